#!/usr/bin/env bash
# Two processes under torchrun. Each is a stage.
#
#   bash examples/torchrun.sh [FOLDER]
#
# The command is the same as without torchrun, but has no --stages, because torchrun starts the stages. Four processes
# with `--replicas 2` are two pipelines of two stages. With `--tensor-parallel-size 2` they are two stages of two ranks.
set -euo pipefail
examples=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${1:-$(mktemp -d)}

generate=("$(command -v sarathi-pp)" generate --model "$examples/tiny-adder" --input "$examples/prompts.jsonl"
    --output "$folder/answers.jsonl" --device cpu --kv-cache-memory 16MiB --quiet)

# --standalone: one machine and a free port. OMP_NUM_THREADS: otherwise each process would take all cores.
export OMP_NUM_THREADS=1
torchrun --standalone --nproc-per-node 2 "${generate[@]}"

# torchrun returns 1 for every failure. The exit code of the run is in this file.
echo "exit code $(cat "$folder/answers.jsonl.run/exit_code"), $(wc -l <"$folder/answers.jsonl") answers"
sarathi-pp report "$folder/answers.jsonl.run"
