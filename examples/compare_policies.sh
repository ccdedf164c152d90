#!/usr/bin/env bash
# The same work under different policies: two real runs, the simulator, and a comparison of the two runs.
#
#   bash examples/compare_policies.sh [FOLDER]
#
# examples/emulated.json describes two emulated stages: 4 ms per microbatch and 50 us per token. `simulate` runs them on
# a virtual clock. `generate --emulate` runs them as real processes that sleep those times. With --model instead of
# --emulate they would compute. To measure your own model first, use
#   sarathi-pp profile --model M --stages 2 --output mine.json
set -euo pipefail
examples=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${1:-$(mktemp -d)}
profile=$examples/emulated.json

# The prompts are token ids of different lengths, because an emulated model has no tokenizer.
python - >"$folder/prompts.jsonl" <<'PYTHON'
import json

for row in range(40):
    prompt = [row + 3] + [7] * (31 + 37 * row % 224)  # no two begin alike, so every token is computed
    print(json.dumps({"prompt_token_ids": prompt, "max_new_tokens": 8, "ignore_eos": True}))
PYTHON

for policy in orca balanced; do
    sarathi-pp generate --emulate "$profile" --input "$folder/prompts.jsonl" --output "$folder/$policy.jsonl" \
        --stages 2 --policy "$policy" --max-num-seqs 32 --quiet
done

# The answers of a run are a workload too: they have the numbers of prompt and output tokens.
sarathi-pp simulate --profile "$profile" --workload "$folder/orca.jsonl" \
    --policy orca --policy sarathi --policy balanced
sarathi-pp compare "$folder/orca.jsonl.run" "$folder/balanced.jsonl.run" --html "$folder/both.html"
