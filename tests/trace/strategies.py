"""Made-up runs for property tests: schedules whose delays are whole eighths of a second, many of them zero."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.trace.schedules import Delay, Schedule, table


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    microbatches, stages = draw(st.integers(1, 6)), draw(st.integers(1, 4))

    def delays(least: int) -> Delay:
        rows = draw(
            st.lists(
                st.lists(st.integers(least, 4), min_size=stages, max_size=stages),
                min_size=microbatches,
                max_size=microbatches,
            )
        )
        return table([[eighths / 8 for eighths in row] for row in rows])

    return Schedule(
        microbatches,
        stages,
        compute=delays(1),
        issue=delays(0),
        transfer=delays(0),
        host=delays(0),
        send_wait=delays(0),
    )
