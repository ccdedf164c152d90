#!/usr/bin/env bash
# One torchrun agent, on every node of a run, with the same options everywhere:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 bash launch/multinode.sh --model DIR --input FILE --output FILE   # on node0
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=node0 bash launch/multinode.sh --model DIR --input FILE --output FILE   # on node1
# Without NODE_RANK the agents meet by c10d and number themselves; then rank 0, which reads the input and writes the
# output, may be on any node, and the files have to be seen by all.
# Ends with the run's exit code as far as this node knows it: OUTPUT.run/exit_code, not torchrun's 1.
#
#   NNODES       nodes of the run: 1 by default
#   NODE_RANK    this one's number, 0 to NNODES - 1: the static rendezvous; left out: c10d
#   NPROC_PER_NODE  ranks on this node, one a GPU: 1 by default
#   MASTER_ADDR  name or address of node 0, or for c10d of the node that hosts the rendezvous
#   MASTER_PORT  its port, 29500 by default: whoever reaches it can run code there, so close it to strangers
#   RDZV_ID      name of the run, the same on its nodes and no other run's: for c10d only. Starts of one name go on
#                with what an earlier one has answered before it was lost
#   LOCAL_ADDR   name or address at which other nodes reach this one, where its own name does not lead to it;
#                Slurm's SLURMD_NODENAME by default
#   INTERFACE    the network interface on which ranks talk: the one that leads to MASTER_ADDR by default
#   MAX_RESTARTS starts again after a lost stage, which resume: 0 by default
#   SARATHI_PP   the command to run: this checkout's, or else the one on PATH
#   NCCL_DEBUG   WARN says what NCCL could not do
# Where NNODES and the like are not given, torchrun's own variables (PET_NNODES and the like) are taken as they are.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SARATHI_PP=${SARATHI_PP:-$root/.venv/bin/sarathi-pp}
[ -x "$SARATHI_PP" ] || SARATHI_PP=sarathi-pp

# give NAME VALUE: torchrun's environment variable of that option, where there is a value.
give() { if [ -n "$2" ]; then export "PET_$1=$2"; fi; }

give NNODES "${NNODES:-}"
give NPROC_PER_NODE "${NPROC_PER_NODE:-}"
give LOCAL_ADDR "${LOCAL_ADDR:-${SLURMD_NODENAME:-}}"
give MAX_RESTARTS "${MAX_RESTARTS:-}"
if [ -n "${NODE_RANK:-}" ]; then
    give NODE_RANK "$NODE_RANK"
    give MASTER_ADDR "${MASTER_ADDR:-}"
    give MASTER_PORT "${MASTER_PORT:-29500}"
elif [ -n "${MASTER_ADDR:-}" ]; then
    give RDZV_BACKEND c10d
    give RDZV_ENDPOINT "$MASTER_ADDR:${MASTER_PORT:-29500}"
    give RDZV_ID "${RDZV_ID:-}"
fi
if [ -n "${INTERFACE:-}" ]; then
    export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
fi

exec "$SARATHI_PP" agent generate "$@"
