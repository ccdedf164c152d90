"""Rank 0's part of a batch: run every input line through the engine, and write its answer to the output."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from signal import Signals as Signal
from typing import TYPE_CHECKING, Any

from sarathi_pp.errors import SarathiError, StoppedError
from sarathi_pp.inputs.input_file import is_regular, is_stream
from sarathi_pp.inputs.request_maker import RequestMaker
from sarathi_pp.inputs.source import FileSource
from sarathi_pp.outputs.journal import Journal, LateJournal
from sarathi_pp.outputs.sink import FileSink
from sarathi_pp.process.signals import Asked, Signals
from sarathi_pp.run.display import Display, StopNotice
from sarathi_pp.run.preflight import BatchOptions, count_total
from sarathi_pp.trace.clock import SystemClock

if TYPE_CHECKING:
    from sarathi_pp.run.rank import Rank


def answer_file(options: BatchOptions, rank: Rank, display: Display, signals: Signals) -> dict[str, Any]:
    """Answer every input line.

    Returns:
        Facts for the report: the numbers of resumed and of written lines, and the signal that stopped the run.
    """
    run, clock = rank.run, SystemClock()
    maker = rank.request_maker(display)
    with (
        _opened_output(options, rank, signals) as journal,
        closing(FileSink(journal, tokenizer=rank.tokenizer, clock=clock, model=run.model)) as sink,
        closing(_open_source(options, rank, maker, journal)) as source,
        display.progress(run.num_stages * run.replicas, count_total(options), journal.done.num_rows) as listener,
    ):
        notice = StopNotice(listener, display)
        with rank.driving(notice) as driver:
            signals.announce(notice)
            try:
                asked = driver.run(source, sink, signals)
            except StoppedError as error:
                error.args = (f"{error}; {options.how_to_resume}",)
                raise
            if isinstance(journal, LateJournal):
                journal.open()
    if (doubt := maker.unknown.warning()) is not None:
        display.warn(doubt)
    return _outcome(rank, journal, sink, asked)


def _outcome(rank: Rank, journal: Journal | LateJournal, sink: FileSink, asked: Asked | None) -> dict[str, Any]:
    """Return the facts about the input lines for the report.

    In a run of one replica, the report counts answers from traces. With several replicas, they are counted here: the
    report leaves out the traces of a lost replica, but the output has the answers of that replica.
    """
    counts = {"completed": sink.num_finished, "failed": sink.num_failed} if rank.run.replicas > 1 else {}
    return {
        "written": {"rows": sink.num_lines, "failed": sink.num_error_lines},
        "resumed": {"rows": journal.done.num_rows, "failed": journal.done.num_errors},
        "stopped_by": Signal(asked.number).name if asked is not None else None,
        **counts,
    }


def _open_source(options: BatchOptions, rank: Rank, maker: RequestMaker, journal: Journal | LateJournal) -> FileSource:
    """Start to read the input. Return the source of the lines that the output does not answer yet."""
    run, rate = rank.run, rank.checked.config.request_rate
    return FileSource(
        options.input_path,
        maker,
        clock=SystemClock(),
        capacity=2 * run.max_num_seqs * run.replicas,
        request_rate=rate,
        done=journal.done,
        asked=options.input_format,
        # A stream is answered while it is written. Drawn arrivals are in the order of the file.
        order=rank.prefix_order() if is_regular(options.input_path) and rate == math.inf else None,
    )


@contextmanager
def _opened_output(options: BatchOptions, rank: Rank, signals: Signals) -> Iterator[Journal | LateJournal]:
    """Yield the journal of a batch, which is its output file with the lines written so far.

    If an error refuses this start before its output is open, remove its files from the run directory. A later start
    then finds nothing of it.

    The format of a stream is only known when it is read, and the error of a wrong format must not cost an existing
    output. So the journal of a stream is opened at the first output line, and no file is made or emptied before.
    """
    output = _Output(options, rank, signals)
    waits = is_stream(options.input_path) and not is_stream(options.output_path) and options.start != "resume"
    try:
        yield LateJournal(options.output_path, output) if waits else output.open()
    except SarathiError as error:
        if not output.begun and not error.at_start:
            rank.checked.run_dir.withdraw()
        raise


class _Output:
    """An opener of a batch's journal, which also records the run in run.json."""

    def __init__(self, options: BatchOptions, rank: Rank, signals: Signals) -> None:
        self._options = options
        self._rank = rank
        self._signals = signals
        self.begun = False  # True once the output belongs to this run, and run.json records it

    def open(self) -> Journal:
        options, rank = self._options, self._rank
        journal = Journal.open(
            options.output_path,
            options.start,
            retry_errors=options.retry_errors,
            wait=self._signals.pause,
            patience_s=options.lock_patience_s,
        )
        try:
            facts = {**rank.describe(), "identity": rank.checked.identity, "job": rank.env.launch_id}
            rank.checked.run_dir.begin(facts)
        except SarathiError:
            journal.close()
            raise
        self.begun = True
        return journal
