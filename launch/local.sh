#!/usr/bin/env bash
# N stages on this machine, over loopback, without torchrun: nothing listens where others could reach it.
#   STAGES=2 bash launch/local.sh --model DIR --input FILE --output FILE [options of `sarathi-pp generate`]
# Ends with the run's exit code, which is also in OUTPUT.run/exit_code.
#
#   STAGES      pipeline stages: 2 by default
#   SARATHI_PP  the command to run: this checkout's, or else the one on PATH
#   OMP_NUM_THREADS  compute threads of a stage: the cores shared out by default
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SARATHI_PP=${SARATHI_PP:-$root/.venv/bin/sarathi-pp}
[ -x "$SARATHI_PP" ] || SARATHI_PP=sarathi-pp

exec "$SARATHI_PP" generate --stages "${STAGES:-2}" "$@"
