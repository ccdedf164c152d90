#!/usr/bin/env bash
# Two nodes with one stage each. On a cluster the two commands run on two machines. Here both run on this one.
#
#   bash examples/two_nodes.sh [FOLDER]
#
# launch/multinode.sh starts torchrun's agent, and ends with the exit code of the run. HEAD is the name or address of
# the first node. INTERFACE may be left out: then ranks use the interface that leads to HEAD. The nodes need the same
# model files and options, but no common folder. Rank 0 reads the prompts, writes the answers and collects all traces.
#
# Slurm and Kubernetes start the same script on every node:
#
#   RUN=runs/first sbatch --nodes 2 launch/slurm.sbatch --model DIR --input FILE --output FILE
#   kubectl apply -f launch/kubernetes/trainjob.yaml
set -euo pipefail
examples=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${1:-$(mktemp -d)}
HEAD=127.0.0.1

mkdir -p "$folder/node0" "$folder/node1"
export NNODES=2 MASTER_ADDR=$HEAD MASTER_PORT=${MASTER_PORT:-29517} INTERFACE=lo OMP_NUM_THREADS=1
generate=(bash "$examples/../launch/multinode.sh" --model "$examples/tiny-adder" --input "$examples/prompts.jsonl"
    --output answers.jsonl --device cpu --kv-cache-memory 16MiB --quiet)

(cd "$folder/node1" && NODE_RANK=1 "${generate[@]}") &
(cd "$folder/node0" && NODE_RANK=0 "${generate[@]}")
wait $!

echo "$(wc -l <"$folder/node0/answers.jsonl") answers on node 0, and on node 1: $(ls "$folder/node1")"
ls "$folder/node0/answers.jsonl.run/attempt-0000"
