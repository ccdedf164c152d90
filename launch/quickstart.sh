#!/usr/bin/env bash
# Sets up, then answers examples/prompts.jsonl with a pipeline of two CPU stages that share examples/tiny-adder.
# Arguments are those of `sarathi-pp generate`; one given here wins over the default below.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/launch/setup.sh"
set_up "$root"

mkdir -p "$root/runs"
run=$(mktemp -d "$root/runs/quickstart-XXXXXX")
code=0
"$root/.venv/bin/sarathi-pp" generate \
    --model "$root/examples/tiny-adder" --input "$root/examples/prompts.jsonl" --output "$run/answers.jsonl" \
    --stages 2 --device cpu "$@" || code=$?

# Nothing to show where an argument sent the answers elsewhere.
if [ -s "$run/answers.jsonl" ]; then
    "$root/.venv/bin/python" - "$run/answers.jsonl" <<'PYTHON'
import json, sys

with open(sys.argv[1], encoding="utf-8") as lines:
    rows = [json.loads(line) for line in lines]
for row in rows[:8]:
    print(f"{row['id']} -> {row.get('text', row.get('error'))}")
print(f"{len(rows)} answers in {sys.argv[1]}")
PYTHON
fi
exit "$code"
