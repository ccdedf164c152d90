#!/usr/bin/env bash
# Which chunk size is best? A sweep on the simulator, then the default policy, which needs no chunk size.
#
#   bash examples/chunk_sizes.sh
#
# Small chunks read the weights more often. Large ones make microbatches unequal: the bubble grows and decodes wait. The
# preset is GPT-3 on eight stages of eight A100s. For your own model, replace it with --profile and a file that
# `sarathi-pp profile` wrote.
set -euo pipefail
workload=uniform:n=100,min=512,max=2048,pd=10

sarathi-pp simulate --preset gpt3-a100-tp8pp8 --workload "$workload" --policy sarathi \
    --chunk-size 128 --chunk-size 256 --chunk-size 512 --chunk-size 1024
# `balanced` chooses a size for each microbatch, from the costs that it learns.
sarathi-pp simulate --preset gpt3-a100-tp8pp8 --workload "$workload" --policy balanced
