#!/usr/bin/env bash
# Starts the torchrun agent of one node. Run it on every node of a run, with the same options:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 bash launch/multinode.sh --model DIR --input FILE --output FILE   # on node0
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=node0 bash launch/multinode.sh --model DIR --input FILE --output FILE   # on node1
# Without NODE_RANK the agents use c10d, which numbers the nodes. Then rank 0 may be on any node. Rank 0 reads the input
# and writes the output, so all nodes have to see these files.
# Ends with the exit code of the run (OUTPUT.run/exit_code), as far as this node knows it, and not with torchrun's 1.
#
#   NNODES       nodes of the run: 1 by default
#   NODE_RANK    number of this node, 0 to NNODES - 1, for the static rendezvous. Without it the rendezvous is c10d
#   NPROC_PER_NODE  ranks on this node, one per GPU: 1 by default
#   MASTER_ADDR  name or address of node 0, or for c10d of the node that hosts the rendezvous
#   MASTER_PORT  port of the rendezvous: 29500 by default. A process that reaches it can run code, so close it to others
#   RDZV_ID      name of the run, for c10d only: the same on all its nodes, and different from that of other runs.
#                A start resumes the lost run of the same name
#   LOCAL_ADDR   name or address of this node for other nodes, if its own name does not lead to it:
#                Slurm's SLURMD_NODENAME by default
#   INTERFACE    network interface of the ranks: by default the one that leads to MASTER_ADDR
#   MAX_RESTARTS most restarts after a lost stage, each of which resumes: 0 by default
#   SARATHI_PP   the command to run: by default that of this checkout, otherwise the one on PATH
#   NCCL_DEBUG   level of NCCL's messages, such as WARN
# If NNODES, NODE_RANK and so on are not given, torchrun's own variables (PET_NNODES and so on) stay as they are.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SARATHI_PP=${SARATHI_PP:-$root/.venv/bin/sarathi-pp}
[ -x "$SARATHI_PP" ] || SARATHI_PP=sarathi-pp

# give NAME VALUE: set torchrun's environment variable of that option, unless the value is empty.
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
