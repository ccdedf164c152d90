#!/usr/bin/env bash
# Tests and measures this checkout on the GPU of this machine, within a time. It installs nothing if PYTHON is given.
#   bash launch/gpu_check.sh                                       with .venv
#   PYTHON=python3 OUT=runs/gpu BUDGET_S=400 bash launch/gpu_check.sh [PART...]
# OUT         folder for log.txt, gpu.json and triton.tgz (compiled kernels). A second call completes gpu.json.
# BUDGET_S    seconds for everything after the installation, at least 60
# TESTS_S     most seconds for the tests, as far as BUDGET_S has them; 0 leaves them out
# KERNELS     triton.tgz of an earlier call: only changed kernels are compiled again
# DOCUMENT    gpu.json of an earlier call, which is completed; ignored if OUT has a gpu.json
# PART...     parts of `sarathi-pp bench gpu`; without them, those that gpu.json lacks
# It ends with 1 if a test or a check fails.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit
out=${OUT:-runs/gpu}
budget=${BUDGET_S:-560}
tests=${TESTS_S:-200}
# Seconds kept for the start and the end of the measurements, and for triton.tgz.
reserve=30
# Seconds in which pytest ends tests that hang and prints those that failed. It takes 5 on two quiet cores.
slowness=${SARATHI_PP_TEST_SLOWNESS:-1}
ending=$((20 * ${slowness%.*}))
if [ "$budget" -lt 60 ]; then
    echo "gpu_check: BUDGET_S=$budget is too short; give at least 60" >&2
    exit 2
fi
if [ -z "${PYTHON:-}" ]; then
    source launch/setup.sh
    set_up "$root" || exit
fi
SECONDS=0
python=${PYTHON:-.venv/bin/python}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$out" "$scratch/path"
# The two packages and not the checkout: its folder `kernels` must not pass for the package of that name.
ln -s "$root/sarathi_pp" "$root/kernels/sarathi_pp_kernels" "$scratch/path"
# Triton finds compiled kernels only in the folder where it wrote them.
export TRITON_CACHE_DIR=$root/runs/triton HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
mkdir -p "$TRITON_CACHE_DIR"
if [ -f "${KERNELS:-}" ]; then tar -xzf "$KERNELS" -C "$TRITON_CACHE_DIR"; fi
if [ -f "${DOCUMENT:-}" ] && [ ! -e "$out/gpu.json" ]; then cp "$DOCUMENT" "$out/gpu.json"; fi

# at_most SECONDS [MORE]: print these seconds, or those that are left of the budget without the reserve and MORE. Print
# at least 1.
at_most() {
    local left=$((budget - SECONDS - reserve - ${2:-0}))
    if [ "$left" -gt "$1" ]; then left=$1; fi
    echo $((left > 1 ? left : 1))
}
# ours SECONDS ARGUMENT...: run sarathi-pp for at most that time.
ours() { PYTHONPATH=$scratch/path${PYTHONPATH:+:$PYTHONPATH} timeout -k 5 "$1" "$python" -P -m sarathi_pp "${@:2}"; }

check() {
    local code=0 parts=() seconds
    timeout -k 5 20 "$python" -m pytest --version
    timeout -k 5 20 nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used,power.limit --format=csv,noheader
    ip link set lo up 2>/dev/null || true # the stages of one machine talk over loopback
    ours "$(at_most 90 5)" doctor --model examples/tiny-adder || code=1
    if [ "$tests" -gt 0 ]; then
        # At this signal pytest ends its tests and prints those that failed.
        timeout -s INT -k "$ending" "$(at_most "$tests" "$ending")" bash launch/test.sh gpu || code=1
    fi
    if [ "$#" -gt 0 ]; then parts=(--parts "$(IFS=,; echo "$*")"); fi
    seconds=$(at_most "$budget")
    ours $((seconds + 15)) bench gpu --budget "$seconds" --output "$out/gpu.json" \
        ${parts[@]+"${parts[@]}"} >/dev/null || code=1
    timeout -k 1 9 tar -czf "$out/triton.tgz" -C "$TRITON_CACHE_DIR" . || rm -f "$out/triton.tgz"
    echo "== $SECONDS s, code $code"
    return $code
}

check "$@" 2>&1 | tee "$out/log.txt"
exit "${PIPESTATUS[0]}"
