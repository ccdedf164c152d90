#!/usr/bin/env bash
# Installs into .venv, then runs the tiers in order. Each prints its time, its budget and its slowest tests. If a tier
# fails, the others still run.
#   bash launch/test.sh [--full] [TIER...]        tiers: static pure model avx2 reports runtime faults launch gpu
#   PYTHON=python3 bash launch/test.sh gpu        without .venv: this Python has torch, Triton, transformers and pytest.
#                                                 It fails without a CUDA device, and is skipped without PYTHON.
# --full adds the cases marked `full`, which repeat a proof on more sizes. It also starts every process cold
# (tests/warm). The last line counts tests and static checks. A budget is the most time that a tier may take on two
# quiet cores that have compiled no kernel yet. A tier over its budget prints a warning and does not fail.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
source launch/setup.sh
if [ -z "${PYTHON:-}" ]; then
    set_up "$root"
elif [ "$*" != gpu ]; then
    echo "test: PYTHON is for the tier gpu only" >&2
    exit 2
fi
python=${PYTHON:-.venv/bin/python}
pytest=(.venv/bin/pytest)
[ -z "${PYTHON:-}" ] || pytest=("$PYTHON" -m pytest)

# Seconds with AVX512-BF16. Others get twice as much, from one quiet run of an AMD EPYC with AVX2.
declare -A budgets=([static]=25 [pure]=25 [model]=430 [avx2]=45 [reports]=95 [runtime]=500 [faults]=240
    [launch]=240 [gpu]=150)
known=(static pure model avx2 reports runtime faults launch gpu)
options=()
tiers=()
for argument in "$@"; do
    if [ "$argument" = --full ]; then
        options+=(--full)
    elif [[ " ${known[*]} " == *" $argument "* ]]; then
        tiers+=("$argument")
    else
        echo "test: $argument is not a tier; give --full or any of: ${known[*]}" >&2
        exit 2
    fi
done
[ ${#tiers[@]} -gt 0 ] || tiers=("${known[@]}")

# No test needs the network, and a tokenizer's threads must not be forked with the workers.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# Files that the tests make once and share: the answers of transformers.
export TESTS_SHARE=$scratch/share
mkdir "$TESTS_SHARE"
passed=0
failed=0

static() {
    local bad=0 check jobs=(-n auto --dist loadfile --cold)
    for check in "ruff format --check ." "ruff check ." "mypy" "lint-imports"; do
        echo "-- $check"
        # Not quoted, because the list above holds command lines of several words.
        if .venv/bin/$check; then passed=$((passed + 1)); else failed=$((failed + 1)) bad=1; fi
    done
    echo "-- tests/architecture"
    run_tests tests/architecture || bad=1
    return $bad
}

# run_tests DIRECTORY...: run the directories that hold tests, with the options in `jobs`. If there are test files,
# pytest's code 5 ("no tests collected") is a failure. Otherwise a tier that lost its tests would look like one that
# passed.
run_tests() {
    local directory present=() code=0 count
    for directory in "$@"; do
        if [ -n "$(find "$directory" -name 'test_*.py' -print -quit 2>/dev/null)" ]; then present+=("$directory"); fi
    done
    if [ ${#present[@]} -eq 0 ]; then
        echo "no tests yet in $*"
        return 0
    fi
    "${pytest[@]}" -q --junit-xml="$scratch/results.xml" ${jobs[@]+"${jobs[@]}"} ${options[@]+"${options[@]}"} \
        "${present[@]}" || code=$?
    count=$("$python" - "$scratch/results.xml" "$scratch/seconds" 2>/dev/null <<'PYTHON' || echo "0 0"
import sys, xml.etree.ElementTree as tree

suite = next(tree.parse(sys.argv[1]).iter("testsuite"))
bad = int(suite.get("failures")) + int(suite.get("errors"))
print(int(suite.get("tests")) - bad - int(suite.get("skipped")), bad)
with open(sys.argv[2], "a") as seconds:
    for case in suite.iter("testcase"):
        print(f"{float(case.get('time')):8.1f} s  {case.get('classname')}::{case.get('name')}", file=seconds)
PYTHON
    )
    rm -f "$scratch/results.xml"
    passed=$((passed + ${count% *}))
    failed=$((failed + ${count#* }))
    # Pytest may fail without a failed test: it collected none, or was killed before it wrote its results.
    if [ "$code" -ne 0 ] && [ "${count#* }" -eq 0 ]; then failed=$((failed + 1)); fi
    return $code
}

# Pure computation: these tests start no processes, do not wait and share no files.
pure() {
    local jobs=(-n auto --cold)
    run_tests tests/core tests/trace tests/analysis tests/sim
}
# The cases of a family follow each other, so each worker makes the models of a part of the families.
families=(-n auto --dist worksteal)
model() {
    local bad=0 jobs=("${families[@]}")
    run_tests tests/model tests/checkpoint tests/drawing tests/kernels tests/mockgpu || bad=1
    oldest || bad=1
    return $bad
}
# Run the cases marked `oldest` again, with the oldest transformers before that of .venv on the path. The folder .oldest
# is kept, as .venv is.
oldest() {
    local jobs=(-m oldest "${families[@]}") folder=$root/.oldest marked
    echo "-- $(grep ^transformers launch/oldest.txt)"
    if ! cmp -s launch/oldest.txt "$folder/oldest.txt"; then
        rm -rf "$folder"
        if ! .venv/bin/python -m pip install -q --no-deps --target "$folder" -r launch/oldest.txt; then
            failed=$((failed + 1))
            return 1
        fi
        cp launch/oldest.txt "$folder"
    fi
    if [ "transformers==$(PYTHONPATH=$folder .venv/bin/python -c 'import transformers as t; print(t.__version__)')" != \
        "$(grep ^transformers launch/oldest.txt)" ]; then
        echo "test: Python imports another transformers than the one in $folder" >&2
        failed=$((failed + 1))
        return 1
    fi
    # By name, because every worker imports all files in which it looks for tests.
    mapfile -t marked < <(
        grep -rl 'mark\.oldest' --include='test_*.py' tests/bench tests/model tests/checkpoint tests/text tests/inputs tests/commands \
            tests/mockgpu
    )
    [ ${#marked[@]} -gt 0 ] || return 1
    PYTHONPATH=$folder run_tests "${marked[@]}"
}
# The kernels, and some of the tests around them, with the instructions of a processor without AVX512. On such a
# processor, the other tiers are that already.
avx2() {
    local bad=0 variables thorough=${#options[@]} jobs=("${families[@]}")
    if ! variables=$(.venv/bin/python -m tests.processors avx2 2>&1); then
        echo "skipped: $variables"
        return 0
    elif ! grep -q avx512f /proc/cpuinfo; then
        echo "skipped: this machine has no more than AVX2"
        return 0
    fi
    mapfile -t variables <<<"$variables"
    # The answers of transformers are computed with these instructions too.
    local -x TESTS_SHARE=$scratch/avx2 "${variables[@]}"
    mkdir -p "$TESTS_SHARE"
    local kernels=(tests/kernels/cpu/test_{simd,row_ops,threads}.py tests/model/fuse tests/model/test_batch_invariant.py)
    if [ "$thorough" -gt 0 ]; then
        run_tests "${kernels[@]}" tests/model/attention || bad=1
        local options=()  # one run of each case of tests/exact is enough
        run_tests tests/exact || bad=1
    else
        jobs+=(-k "not every_processor and (not test_exactness or greedy_output and (llama or gpt_oss))")
        run_tests "${kernels[@]}" tests/exact/test_exactness.py || bad=1
    fi
    return $bad
}
# has PROGRAM PACKAGE: install the package if the program is missing. Only root can. Otherwise its tests are skipped.
has() {
    if ! command -v "$1" >/dev/null && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        echo "-- installing $2"
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$2"; } \
            >"$scratch/apt.log" 2>&1 || tail -n 5 "$scratch/apt.log" >&2
    fi
}
# The tests open the HTML page in a browser.
reports() {
    local jobs=(-n auto --dist loadfile)
    has chromium chromium
    run_tests tests/report tests/bench tests/tuning tests/browser
}
# Tests that start processes wait for half of their time. So there are three workers per core, up to eight. A file stays
# with one worker, which makes its fixtures once. Time limits follow the load (tests/machine.py).
cores=$(nproc)
waiting=(-n "$((cores > 8 ? cores : cores > 2 ? 8 : 3 * cores))" --dist loadfile --no-loadscope-reorder)
# These tests compare measured times with expected ones, so they run alone.
timed_runtime=(
    tests/commands/test_{bench_command,emulated,tried_advice}.py tests/engine/test_simulated_order.py
)
# These tests need heartbeats in time. They mostly sleep, so two of them at once leave cores idle.
timed_faults=(tests/faults/test_slow.py)
# The longest files start first, so that all workers end at about the same time.
longest_faults=(tests/faults/test_{network,resume,replicas,hub,inside,large_rows}.py)
runtime() {
    local bad=0 jobs=("${families[@]}")
    has ip iproute2  # hosts are network namespaces
    run_tests tests/exact || bad=1
    jobs=("${waiting[@]}" "${timed_runtime[@]/#/--ignore=}")
    # Folders with the longest files come first, so that all workers end at about the same time.
    run_tests tests/commands tests/api tests/distributed tests/stages tests/engine tests/wire tests/text tests/run \
        tests/inputs tests/outputs tests/process tests/warm || bad=1
    jobs=()
    run_tests "${timed_runtime[@]}" || bad=1
    return $bad
}
faults() {
    local bad=0 others jobs=("${waiting[@]}")
    has ip iproute2
    # Files are listed by name, because pytest leaves out a file that is also in a given directory.
    mapfile -t others < <(
        printf '%s\n' tests/faults/test_*.py | grep -vxFf <(printf '%s\n' "${longest_faults[@]}" "${timed_faults[@]}")
    )
    [ ${#others[@]} -gt 0 ] || bad=1
    run_tests "${longest_faults[@]}" "${others[@]}" || bad=1
    jobs=(-n 2 --dist worksteal)
    run_tests "${timed_faults[@]}" || bad=1
    return $bad
}
launch() {
    local jobs=("${waiting[@]}")
    has ip iproute2
    run_tests tests/launch tests/packaging tests/examples
}
# Compiled kernels, graphs and pipelines on a CUDA device. They compile for most of their time, so several at once. They
# share no state, so they go to the workers one by one. A device does not slow down as cores do, so their time limits do
# not grow with the number of workers.
gpu() {
    # A warning that a library gives on a GPU is no fault of ours. One line per test shows where a run hung. A thread
    # can end a worker that waits for the device; a signal cannot.
    local jobs=(--cold -W default -vv -n "$((cores > 6 ? 6 : cores))" --dist load --maxschedchunk 1)
    jobs+=(--timeout-method thread)
    local -x SARATHI_PP_TEST_SLOWNESS=${SARATHI_PP_TEST_SLOWNESS:-1}
    if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        if [ -n "${PYTHON:-}" ]; then
            echo "test: $PYTHON finds no CUDA device" >&2
            failed=$((failed + 1))
            return 1
        fi
        echo "skipped: no CUDA device"
        return 0
    fi
    run_tests tests/gpu
}

# budget TIER: print the budget on this machine in seconds. Print nothing with --full, which has no budget.
budget() {
    local seconds=${budgets[$1]}
    [ ${#options[@]} -eq 0 ] || return 0
    grep -q avx512_bf16 /proc/cpuinfo 2>/dev/null || seconds=$((2 * seconds))
    echo "$seconds"
}

# took TIER SECONDS: print the slowest tests, and a warning if the tier took longer than its budget.
took() {
    local limit
    limit=$(budget "$1")
    if [ -s "$scratch/seconds" ]; then
        echo "-- slowest tests of $1"
        sort -rn "$scratch/seconds" | sed -n 1,10p  # sed reads to the end; `head` would end `sort` by a signal
    fi
    if [ -n "$limit" ] && [ "$2" -gt "$limit" ]; then
        echo "WARNING: $1 took $2 s, and its budget is $limit s: mark repeats as full, or share slow fixtures" >&2
    fi
    : >"$scratch/seconds"
}

summary=()
code=0
for tier in "${tiers[@]}"; do
    echo "== $tier"
    start=$SECONDS
    result=ok
    "$tier" || { result=FAILED code=1; }
    seconds=$((SECONDS - start))
    took "$tier" "$seconds"
    limit=$(budget "$tier")
    summary+=("$(printf '%-8s %-6s %4d s%s' "$tier" "$result" "$seconds" "${limit:+ of $limit s}")")
    echo "${summary[-1]}"
done
echo "=="
printf '%s\n' "${summary[@]}"
echo "$passed passed, $failed failed"
exit $code
