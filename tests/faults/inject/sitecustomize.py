"""Make one stage of a run fail from inside, if no signal or file can do it: on the PYTHONPATH of its processes.

    SARATHI_PP_TEST_FAULT=stage=1:step=7:raise

stage: the stage that fails. step: number of its microbatch, counted from 0. Then comes the fault:

    raise, hang   at that microbatch
    memory        no memory, the first time it computes that microbatch
    stall         loading never ends, for any step; leaves a file of that name
    full          the host's memory has only that number of bytes free
    versions      the stage reports another release
    vocabulary    reading the vocabulary for grammars keeps the interpreter's lock for `step` milliseconds
    tokenizer     loading the tokenizer keeps that lock for `step` milliseconds

With stage=* every rank may be silent for a second in set-up. Then `slow` makes the ranks take turns to compute for
`step` milliseconds longer in each phase of set-up; `stop` makes rank 1 stop itself in phase number `step`. The package
contains none of this.
"""

import importlib.abc
import importlib.util
import os
import signal
import sys
import time
from contextlib import contextmanager

FAULT = os.environ.get("SARATHI_PP_TEST_FAULT", "")
# Imported before any rank has joined.
DISTURBED = {what: "sarathi_pp.distributed.control_plane" for what in ("slow", "stop")}
# The function that keeps the interpreter's lock, by the fault.
HOLDERS = {
    "vocabulary": ("sarathi_pp.drawing.grammar", "_vocabulary"),
    "tokenizer": ("sarathi_pp.text.tokenizer_backend", "_load"),
}
TARGETS = {**DISTURBED, **{what: module for what, (module, _) in HOLDERS.items()}}
TARGET = TARGETS.get(FAULT.rpartition(":")[2], "sarathi_pp.stages.model_stage")
PATIENCE_S = 1.0


def fail(what):
    if what == "raise":
        raise RuntimeError("injected into a layer")
    if what == "hang":
        while True:
            time.sleep(1000)
    if what == "memory":
        import torch

        raise torch.OutOfMemoryError("injected: out of memory")


def compute(seconds):
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        sum(range(20_000))


def disturb_phases(step, what):
    from sarathi_pp.distributed import agreement, presence

    rank, size, phases = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), []
    step_of, present = agreement.Agreement.step, presence.Presence.__init__

    def impatient(self, store, rank, names, patience_s, clock, activity=None):
        present(self, store, rank, names, PATIENCE_S, clock, activity)

    @contextmanager
    def disturbed(self, phase, detail="", **options):
        number = len(phases)
        phases.append(phase)
        with step_of(self, phase, detail, **options) as one:
            if what == "slow" and number % size == rank:
                compute(step / 1000)
            if what == "stop" and (number, rank) == (step, 1):
                time.sleep(0.3)  # let the others see in which phase this rank is
                os.kill(os.getpid(), signal.SIGSTOP)
            yield one

    presence.Presence.__init__ = impatient
    agreement.Agreement.step = disturbed


def is_chosen(stage):
    """Check if this process is that stage; a launcher counts as stage 0, and its ranks may start as copies of it."""
    return stage in (os.environ.get("RANK", "0"), "*")


def stall_loading(module, stage):
    load = module.ModelStages.load

    def stall(self, layers, room_bytes):
        if not is_chosen(stage):
            return load(self, layers, room_bytes)
        with open("stalled", "w"):
            fail("hang")

    module.ModelStages.load = stall


def leave_free(num_bytes, stage):
    import dataclasses

    from sarathi_pp.stages import capacity

    found = capacity.memory_pools

    def pools():
        left = {"free_bytes": num_bytes} if is_chosen(stage) else {}
        return tuple(dataclasses.replace(pool, **left) for pool in found())

    capacity.memory_pools = pools


def hold_lock(module, name, stage, milliseconds):
    import ctypes

    function = vars(module)[name]

    def slow(*arguments):
        if is_chosen(stage):
            ctypes.PyDLL(None).usleep(milliseconds * 1000)  # a PyDLL keeps the lock, as the library does
        return function(*arguments)

    setattr(module, name, slow)


def fail_in_microbatch(module, stage, step, what):
    prepare, steps = module.ModelStage.prepare, []

    def prepare_and_fail(self, microbatch):
        if not is_chosen(stage):
            return prepare(self, microbatch)
        compute, number = prepare(self, microbatch), len(steps)
        steps.append([])

        def compute_or_fail(hidden):
            steps[number].append(hidden is None)
            if number == step and len(steps[number]) == 1:
                fail(what)
            return compute(hidden)

        return compute_or_fail

    module.ModelStage.prepare = prepare_and_fail


def spoil(module, stage, step, what):
    if vars(module).setdefault("spoiled", os.getpid()) != os.getpid():
        return  # the launcher did it already, as the same stage
    if what in DISTURBED:
        disturb_phases(step, what)
    elif what == "stall":
        stall_loading(module, stage)
    elif what == "full":
        leave_free(step, stage)
    elif what in HOLDERS:
        hold_lock(module, HOLDERS[what][1], stage, step)
    else:
        fail_in_microbatch(module, stage, step, what)


class Finder(importlib.abc.MetaPathFinder):
    """An importer that finds the module as usual and changes it after the import."""

    def __init__(self, stage, step, what):
        self.stage, self.step, self.what = stage, step, what

    def find_spec(self, name, path, target=None):
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            spoil(module, self.stage, self.step, self.what)

        spec.loader.exec_module = exec_module
        return spec


if FAULT:
    stage, step, what = (part.rpartition("=")[2] for part in FAULT.split(":"))
    if stage == "*" and "RANK" not in os.environ:
        pass  # the launcher
    elif is_chosen(stage):
        if what == "versions":
            import sarathi_pp

            sarathi_pp.__version__ = "9.9.9"
        else:
            if TARGET in sys.modules:
                spoil(sys.modules[TARGET], stage, int(step), what)
            else:
                sys.meta_path.insert(0, Finder(stage, int(step), what))
