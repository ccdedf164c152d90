#!/usr/bin/env bash
# A file of prompts gives a file of answers. The run is stopped halfway and resumed.
#
#   bash examples/batch_and_resume.sh [FOLDER]
#
# `kill` sends SIGTERM, as Slurm and Kubernetes do to stop a job. The run starts no new requests, lets running ones
# finish for up to 20 seconds and exits with 75. That code means that the same command with --resume continues.
set -euo pipefail
examples=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${1:-$(mktemp -d)}

# Ten times the 24 prompts, without their ids. A line without an id gets its number as its id, so all ids differ.
for _ in {1..10}; do sed 's/"id": "[^"]*", //' "$examples/prompts.jsonl"; done >"$folder/prompts.jsonl"

# An array and not a function: in the background it is the process itself, so the signal reaches it.
generate=(sarathi-pp generate --model "$examples/tiny-adder" --input "$folder/prompts.jsonl"
    --output "$folder/answers.jsonl" --stages 2 --device cpu --kv-cache-memory 16MiB --quiet)

# 80 rows per second. Otherwise a model this small would finish before it is stopped.
"${generate[@]}" --request-rate 80 --overwrite &
job=$!
until [ "$(cat "$folder/answers.jsonl" 2>/dev/null | wc -l)" -ge 20 ]; do sleep 0.1; done
kill -TERM "$job"
code=0
wait "$job" || code=$?
echo "stopped with code $code before all of 240 were answered: $(wc -l <"$folder/answers.jsonl")"

# Rows that have a line are skipped. The others get the answers that they would have got without the stop. The number of
# stages, the sizes and the policy may change.
"${generate[@]}" --resume
ids=$(grep -o '"id":"[^"]*"' "$folder/answers.jsonl" | sort -u | wc -l)
echo "resumed: $(wc -l <"$folder/answers.jsonl") answers to $ids rows"
