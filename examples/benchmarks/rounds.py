"""The rule for disturbed rounds of a contest on a shared host.

In a round each entrant runs once, and figures are compared within the round. If the host gives the cores to another
machine during one of these runs, the comparison says more about the host than about the entrants.

    round    0    1    2    3    4       two rounds are wanted
    stolen  0 %  9 %  5 %  1 %           round 3 is the second undisturbed one: no further round
                 disturbed

A disturbed round stays in the document, with a mark. Medians and ratios leave it out, and another round replaces it. On
a host that is never quiet, this ends after MOST_ROUNDS times the wanted rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sarathi_pp.bench.contest import Entrant, Run, Work, hold

# A round is disturbed if the host took more than this share (0 to 1) of the cores' time during one of its runs.
MOST_STOLEN = 0.02
# Most rounds, as a multiple of the wanted undisturbed ones.
MOST_ROUNDS = 3


def hold_undisturbed(work: Work, entrants: Sequence[Entrant], wanted: int) -> Iterator[Run]:
    """Run rounds and yield each run, until `wanted` rounds were undisturbed or MOST_ROUNDS times as many are over."""
    runs: list[Run] = []
    for run in hold(work, entrants, MOST_ROUNDS * wanted):
        runs.append(run)
        yield run
        if len(runs) % len(entrants) == 0 and count_undisturbed(runs) >= wanted:
            return


def disturbed_rounds(runs: Sequence[Run]) -> set[int]:
    """Return the indices of the disturbed rounds."""
    return {run.round for run in runs if run.stolen > MOST_STOLEN}


def undisturbed(runs: Sequence[Run]) -> list[Run]:
    """Return the runs of undisturbed rounds, in the same order."""
    disturbed = disturbed_rounds(runs)
    return [run for run in runs if run.round not in disturbed]


def count_undisturbed(runs: Sequence[Run]) -> int:
    return len({run.round for run in undisturbed(runs)})


def describe_rounds(runs: Sequence[Run], wanted: int) -> dict[str, Any]:
    """Return the numbers of rounds for a document. `runs` are those of whole rounds."""
    return {
        "rounds": len({run.round for run in runs}),
        "undisturbed rounds": count_undisturbed(runs),
        "wanted rounds": wanted,
        "most stolen": MOST_STOLEN,
    }


def missing_rounds(runs: Sequence[Run], wanted: int) -> str | None:
    """Return a sentence for the user if fewer rounds than wanted were undisturbed, and None otherwise."""
    found = count_undisturbed(runs)
    if found >= wanted:
        return None
    return (
        f"Only {found} of {wanted} wanted rounds were undisturbed. In {len(disturbed_rounds(runs))} other rounds, the "
        f"host took more than {MOST_STOLEN:.0%} of the cores' time during a run."
    )
