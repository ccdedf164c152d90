"""A run whose rows are made, not read, such as the one that measures a profile."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Protocol

from sarathi_pp.config import ResolvedRun, RunConfig
from sarathi_pp.distributed.environment import RankEnvironment
from sarathi_pp.distributed.refusal import refuse
from sarathi_pp.errors import SarathiError
from sarathi_pp.inputs.generation_config import GenerationDefaults
from sarathi_pp.inputs.row import Row
from sarathi_pp.inputs.source import MemorySource
from sarathi_pp.model.checkpoint.support import ModelFacts
from sarathi_pp.outputs.run_directory import RunDirectory
from sarathi_pp.outputs.sink import Sink
from sarathi_pp.run.display import Display
from sarathi_pp.run.ending import Ending, exit_code, heeding
from sarathi_pp.run.joining import joined, ready
from sarathi_pp.run.preflight import Preflight, open_model

if TYPE_CHECKING:
    from sarathi_pp.run.finished_run import FinishedRun
    from sarathi_pp.run.rank import Rank


class RowMaker(Protocol):
    """Whose rows rank 0 answers. rows: called once the run is known. finish: called once it is over."""

    def rows(self, run: ResolvedRun, facts: ModelFacts) -> Sequence[Row]: ...
    def finish(self, finished: FinishedRun) -> None: ...


def run_rows(
    config: RunConfig, env: RankEnvironment | None, maker: RowMaker, sink: Sink, display: Display, *, overwrite: bool
) -> int:
    """One rank of the run; returns the exit code of this process.

    sink: gets what the rows end with, on rank 0. The run directory is thrown away unless the configuration names one;
    then `overwrite` says whether it may replace an earlier run's.
    """
    env = env or RankEnvironment()
    try:
        config, model_dir, profile, facts = open_model(config)
    except SarathiError as error:
        return refuse(error, env, config.join_timeout_s, display)
    # Inside the launcher's own directory, which it removes, where there is one: a rank that fails does not tidy up.
    private = Path(env.store).parent if env.store else None
    with TemporaryDirectory(prefix="sarathi-pp-", dir=private) as scratch, ExitStack() as held:
        run_dir = RunDirectory(config.run_dir or Path(scratch) / "run")
        if config.run_dir is not None and env.rank == 0:
            run_dir = held.enter_context(RunDirectory.claim(config.run_dir, overwrite=overwrite))
        config = replace(config, run_dir=run_dir.path)
        checked = Preflight(config, model_dir, profile, facts, GenerationDefaults(), run_dir)
        ending = Ending(env, config, display, run_dir)
        with exit_code(ending), heeding(ending), joined(env, config) as plane:
            with ready(checked, plane, ending) as rank:
                if env.rank == 0:
                    _answer_rows(rank, maker, sink, display)
                else:
                    rank.serve()
                finished = rank.finish()
            if finished is not None:
                maker.finish(finished)
    return ending.code


def _answer_rows(rank: Rank, maker: RowMaker, sink: Sink, display: Display) -> None:
    run, checked = rank.run, rank.checked
    checked.run_dir.begin(rank.describe())
    tokenizer = checked.tokenizer()
    with (
        display.progress(run.num_stages) as listener,
        rank.driving(tokenizer, listener) as driver,
    ):
        driver.run(MemorySource(maker.rows(run, checked.facts)), sink)
