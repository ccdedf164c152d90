"""The path of one request between the command and its answer, in figures: files, and named forms.

    python -m tests.architecture.walk            this tree
    python -m tests.architecture.walk PATH       another checkout, for example an older commit

Runs of `generate` on two stages answer one request at a time with the plainest policy. Some runs have few requests and
some have more. All calls of the product's functions are counted in every process. A request passes the functions whose
number of calls grows by the number of additional requests. The most calls of several short runs are compared with the
fewest of several long ones. The reason is that calls that depend on time vary.

A form is a class of which each request makes an instance that passes from one file to another. A file is passed if it
makes, takes or returns a form there. Events of the trace report a request and do not carry it. They are left out, with
all that they call. So is their use by the command after the run.
"""

from __future__ import annotations

import json
import operator
import os
import subprocess
import sys
import tempfile
from collections import Counter
from functools import reduce
from pathlib import Path

ROOT = Path(__file__).parents[2]
FEW, MORE = 4, 12
RUNS = 3
REPORTING = ("analysis", "report", "sim", "trace", "tuning", "cli/runs.py")  # the last one of older commits
# Counts calls of product code in a process with this on its path as sitecustomize.py.
COUNTER = """
import atexit, json, os, sys, threading
from collections import Counter
from multiprocessing import util

MAKERS = ("__init__", "__new__", "<lambda>")  # of dataclasses and of named tuples
root = os.environ["WALK_ROOT"] + "/"
reporting = tuple(f"{root}sarathi_pp/{name}" for name in os.environ["WALK_REPORTING"].split())
reports = threading.local()  # depth: how many calls of reporting code this thread is in
made, carried = Counter(), Counter()


def name_of(kind):
    return f"{kind.__module__}:{kind.__qualname__}"


def is_ours(kind):
    return kind.__module__.startswith("sarathi_pp.")


def note(code, values):
    for value in values:
        kind = type(value)
        if kind in (list, tuple) and value:
            kind = type(value[0])
        if is_ours(kind):
            carried[f"{code.co_filename.removeprefix(root)} {name_of(kind)}"] += 1


def note_made(kind, maker):
    if not is_ours(kind):
        return
    made[name_of(kind)] += 1
    while maker is not None and not maker.f_code.co_filename.startswith(root):
        maker = maker.f_back
    if maker is not None:
        carried[f"{maker.f_code.co_filename.removeprefix(root)} {name_of(kind)}"] += 1


def profile(frame, event, argument):
    code = frame.f_code
    if event in ("call", "return") and code.co_filename.startswith(reporting):
        reports.depth = getattr(reports, "depth", 0) + (1 if event == "call" else -1)
        return
    if getattr(reports, "depth", 0):
        return
    if event == "call" and code.co_filename == "<string>" and code.co_argcount and code.co_name in MAKERS:
        first = frame.f_locals.get(code.co_varnames[0])
        note_made(first if isinstance(first, type) else type(first), frame.f_back)
    elif event in ("call", "return") and code.co_filename.startswith(root + "sarathi_pp/"):
        if event == "return":
            note(code, [argument])
            return
        values = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
        if code.co_name == "__init__":
            note_made(type(values[0]), frame.f_back)
        note(code, values)


def copied(counts):
    while True:
        try:
            return dict(counts)
        except RuntimeError:  # another thread counts
            pass


def write():
    sys.setprofile(None)
    with open(own, "w") as out:
        json.dump({"made": copied(made), "carried": copied(carried)}, out)


def leave(code):
    write()
    real_exit(code)


own = os.path.join(os.environ["WALK_OUT"], f"{os.getpid()}.json")
open(own, "w").close()  # so that one that leaves no counts is missed
real_exit, os._exit = os._exit, leave
atexit.register(write)
util.Finalize(None, write, exitpriority=0)
threading.setprofile(profile)
sys.setprofile(profile)
"""


def count(root: Path, num_requests: int) -> dict[str, Counter[str]]:
    """Count the instances that a run makes and carries, in all its processes."""
    with tempfile.TemporaryDirectory() as folder:
        site, out, rows = Path(folder, "site"), Path(folder, "out"), Path(folder, "rows.jsonl")
        site.mkdir()
        out.mkdir()
        (site / "sitecustomize.py").write_text(COUNTER)
        rows.write_text("".join(f'{{"prompt": "{10 + row}+{20 + row}="}}\n' for row in range(num_requests)))
        places = {"WALK_ROOT": str(root), "WALK_OUT": str(out), "WALK_REPORTING": " ".join(REPORTING)}
        path = os.pathsep.join(map(str, (site, root, root / "kernels")))
        command = [sys.executable, "-m", "sarathi_pp", "generate", "--model", str(root / "examples/tiny-adder")]
        command += ["--input", str(rows), "--output", f"{folder}/answers.jsonl", "--max-new-tokens", "2", "--quiet"]
        command += ["--stages", "2", "--device", "cpu", "--policy", "sarathi", "--head", "last", "--max-num-seqs", "1"]
        subprocess.run(command, cwd=folder, env={**os.environ, **places, "PYTHONPATH": path}, check=True)
        totals: dict[str, Counter[str]] = {"made": Counter(), "carried": Counter()}
        for written in out.iterdir():
            assert (text := written.read_text()), f"process {written.stem} has left no counts"
            for kind, counts in json.loads(text).items():
                totals[kind].update(counts)
    return totals


def measure(root: Path) -> dict[str, object]:
    few, more = ([count(root, number) for _ in range(RUNS)] for number in (FEW, MORE))
    each = {}
    for kind in ("made", "carried"):
        most = reduce(operator.or_, (counts[kind] for counts in few))
        least = reduce(operator.and_, (counts[kind] for counts in more))
        each[kind] = {name for name, number in least.items() if number - most[name] >= MORE - FEW}
    carriers: dict[str, set[str]] = {}
    for path, name in (place.split(" ") for place in each["carried"]):
        packages = {path.split("/")[1], name.split(".")[1]}
        if name in each["made"] and packages.isdisjoint(REPORTING):
            carriers.setdefault(name, set()).add(path)
    forms = {name: paths for name, paths in carriers.items() if len(paths) > 1}
    passed = set().union(*forms.values())
    return {"files": len(passed), "forms": len(forms), "passed": sorted(passed), "named": sorted(forms)}


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT), indent=1))
