#!/usr/bin/env bash
# Starts N stages on this machine, without torchrun. They listen on loopback only, so no other host can reach them.
#   STAGES=2 bash launch/local.sh --model DIR --input FILE --output FILE [options of `sarathi-pp generate`]
# Ends with the run's exit code, which is also in OUTPUT.run/exit_code.
#
#   STAGES      pipeline stages: 2 by default
#   SARATHI_PP  the command to run: by default that of this checkout, otherwise the one on PATH
#   OMP_NUM_THREADS  compute threads per stage: by default the cores are divided among the stages
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SARATHI_PP=${SARATHI_PP:-$root/.venv/bin/sarathi-pp}
[ -x "$SARATHI_PP" ] || SARATHI_PP=sarathi-pp

exec "$SARATHI_PP" generate --stages "${STAGES:-2}" "$@"
