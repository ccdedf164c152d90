#!/usr/bin/env bash
# Two processes under torchrun, each a stage.
#
#   bash examples/torchrun.sh [FOLDER]
#
# The command is that of one machine, behind torchrun and without --stages: stages are what torchrun starts. With
# `--replicas 2` and four processes they are two pipelines of two stages, with `--tensor-parallel-size 2` two stages of
# two ranks each.
set -euo pipefail
examples=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${1:-$(mktemp -d)}

generate=("$(command -v sarathi-pp)" generate --model "$examples/tiny-adder" --input "$examples/prompts.jsonl"
    --output "$folder/answers.jsonl" --device cpu --kv-cache-memory 16MiB --quiet)

# --standalone: one machine, a port that is free. Threads: each process would else take all cores.
export OMP_NUM_THREADS=1
torchrun --standalone --nproc-per-node 2 "${generate[@]}"

# torchrun itself returns 1 for every failure; the run's own exit code is here.
echo "exit code $(cat "$folder/answers.jsonl.run/exit_code"), $(wc -l <"$folder/answers.jsonl") answers"
sarathi-pp report "$folder/answers.jsonl.run"
