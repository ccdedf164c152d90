#!/usr/bin/env bash
# A file of prompts in, a file of answers out; stopped on the way, and gone on with.
#
#   bash examples/batch_and_resume.sh [FOLDER]
#
# `kill` stands for whatever stops a job: it sends SIGTERM, as Slurm and Kubernetes do. The run begins nothing more,
# finishes what runs for up to 20 seconds, and ends with 75, which says: the same command with --resume goes on.
set -euo pipefail
examples=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${1:-$(mktemp -d)}

# Ten times the 24 prompts. Lines without an id are called by their number, so ids do not collide.
for _ in {1..10}; do sed 's/"id": "[^"]*", //' "$examples/prompts.jsonl"; done >"$folder/prompts.jsonl"

# An array, so that in the background it is a process of its own, and the signal reaches it.
generate=(sarathi-pp generate --model "$examples/tiny-adder" --input "$folder/prompts.jsonl"
    --output "$folder/answers.jsonl" --stages 2 --device cpu --kv-cache-memory 16MiB --quiet)

# 80 rows a second, as if somebody wrote them: a model this small would else be done before it is stopped.
"${generate[@]}" --request-rate 80 --overwrite &
job=$!
until [ "$(cat "$folder/answers.jsonl" 2>/dev/null | wc -l)" -ge 20 ]; do sleep 0.1; done
kill -TERM "$job"
code=0
wait "$job" || code=$?
echo "stopped with code $code before all of 240 were answered: $(wc -l <"$folder/answers.jsonl")"

# Other stages, sizes and policies would do as well: rows that have a line are skipped, the others get what they would
# have got.
"${generate[@]}" --resume
ids=$(grep -o '"id":"[^"]*"' "$folder/answers.jsonl" | sort -u | wc -l)
echo "resumed: $(wc -l <"$folder/answers.jsonl") answers to $ids rows"
