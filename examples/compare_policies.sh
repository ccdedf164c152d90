#!/usr/bin/env bash
# The same work under three policies: simulated, then for real, and the two runs side by side.
#
#   bash examples/compare_policies.sh [FOLDER]
#
# examples/emulated.json describes two emulated stages: 4 ms a microbatch and 50 us a token. `simulate` puts it on a
# virtual clock, `generate --emulate` into real processes that sleep those times; with --model in place of --emulate
# they would compute. To measure your own model first:  sarathi-pp profile --model M --stages 2 --output mine.json
set -euo pipefail
examples=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${1:-$(mktemp -d)}
profile=$examples/emulated.json

# The prompts are token ids of different lengths, as an emulated model has no tokenizer.
python - >"$folder/prompts.jsonl" <<'PYTHON'
import json

for row in range(40):
    print(json.dumps({"prompt_token_ids": [7] * (32 + 37 * row % 224), "max_new_tokens": 8, "ignore_eos": True}))
PYTHON

for policy in orca balanced; do
    sarathi-pp generate --emulate "$profile" --input "$folder/prompts.jsonl" --output "$folder/$policy.jsonl" \
        --stages 2 --policy "$policy" --max-num-seqs 32 --quiet
done

# The answers of a run are a workload too: so many tokens in, so many out.
sarathi-pp simulate --profile "$profile" --workload "$folder/orca.jsonl" \
    --policy orca --policy sarathi --policy balanced
sarathi-pp compare "$folder/orca.jsonl.run" "$folder/balanced.jsonl.run" --html "$folder/both.html"
