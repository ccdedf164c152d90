#!/usr/bin/env bash
# Installs into .venv, then answers examples/prompts.jsonl with examples/tiny-adder on two CPU stages.
# Arguments are those of `sarathi-pp generate`. They win over the defaults below.
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

# An argument may send the answers to another file. Then there is nothing to show here.
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
