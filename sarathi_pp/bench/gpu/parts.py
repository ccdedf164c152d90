"""The parts of `sarathi-pp bench gpu`, in order of value, and the processes that run them. Imports no torch.

    process   parts
    device    machine, rates
    exact     exact
    large     microbatches, piggyback, kernels     the large model is loaded once
    layers    attention, sampling, logits, tiles
    figures   profile, nccl
    contest   contest

Whatever can break the device or hang costs only its own part: the next parts run in a new process.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

# Most seconds from the start of a process to its first part. A fresh machine reads gigabytes of libraries then.
START_S = 120.0


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the suite.

    Attributes:
        process: neighbours with the same name share a process.
        limit_s: most seconds that the part may take. Then its process is killed.
        needs: parts whose figures it reads. They must be complete before it.
    """

    name: str
    process: str
    limit_s: float
    needs: tuple[str, ...] = ()


PARTS = (
    Part("machine", "device", 60.0),
    Part("rates", "device", 40.0),
    Part("exact", "exact", 200.0),
    Part("microbatches", "large", 90.0, ("rates",)),
    Part("piggyback", "large", 60.0),
    Part("kernels", "large", 40.0),
    Part("attention", "layers", 90.0, ("rates",)),
    Part("sampling", "layers", 40.0),
    Part("logits", "layers", 60.0),
    Part("tiles", "layers", 120.0),
    Part("profile", "figures", 20.0, ("rates",)),
    Part("nccl", "figures", 30.0),
    Part("contest", "contest", 200.0),
)
NAMES = tuple(part.name for part in PARTS)


def choose(named: Collection[str], complete: Collection[str]) -> list[Part]:
    """Return the parts to run, in their order.

    `machine` always runs, because figures of two machines must not be mixed.

    Args:
        named: names of the parts to run; empty for all parts that are not complete. Parts that these need are added if
            they are not complete.
        complete: names of the parts that have all their figures.
    """
    chosen = {*named} if named else {*NAMES} - {*complete}
    needed = {name for part in PARTS if part.name in chosen for name in part.needs}
    chosen |= needed - {*complete}
    return [part for part in PARTS if part.name in chosen or part.name == "machine"]


def share_process(parts: Sequence[Part]) -> list[Part]:
    """Return the first part and those after it that run in the same process."""
    end = next((at for at, part in enumerate(parts) if part.process != parts[0].process), len(parts))
    return list(parts[:end])
