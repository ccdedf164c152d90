"""Synthetic runs for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.analysis.schedules import Delay, Schedule, table


@st.composite
def schedules(
    draw: st.DrawFn, *, microbatches: int = 6, least_compute: int = 1, most: int = 4, fraction: int = 8
) -> Schedule:
    """Draw runs of up to `microbatches` on up to four stages. Delays have up to `most` fractions of a second.

    Fractions are exact in binary, so that sums compare with ==, and many delays are zero.
    """
    count, stages = draw(st.integers(1, microbatches)), draw(st.integers(1, 4))

    def delays(least: int) -> Delay:
        """Draw one byte per delay: one draw takes a tenth of the time of drawing a list."""
        drawn = draw(st.binary(min_size=count * stages, max_size=count * stages))
        seconds = [(least + byte % (most + 1 - least)) / fraction for byte in drawn]
        return table([seconds[m * stages : (m + 1) * stages] for m in range(count)])

    return Schedule(
        count,
        stages,
        compute=delays(least_compute),
        issue=delays(0),
        transfer=delays(0),
        host=delays(0),
        send_wait=delays(0),
    )
