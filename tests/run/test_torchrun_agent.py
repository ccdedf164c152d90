"""The exit code of an agent, for any code of torchrun; tests/launch has whole runs under it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from sarathi_pp.errors import ConfigError
from sarathi_pp.outputs.run_directory import RunDirectory
from sarathi_pp.run import torchrun_agent

End = Callable[[RunDirectory], None]


def failed(*codes: int) -> End:
    def end(run_dir: RunDirectory) -> None:
        failures = {rank: ProcessFailure(rank, 0, code, "nowhere") for rank, code in enumerate(codes)}
        raise ChildFailedError("sarathi-pp", failures)

    return end


def signalled(number: signal.Signals) -> End:
    def end(run_dir: RunDirectory) -> None:
        raise SignalException("told to stop", number)

    return end


def writing(code: int, then: End) -> End:
    def end(run_dir: RunDirectory) -> None:
        (run_dir.path / "exit_code").unlink(missing_ok=True)  # rank 0 does this when it claims the directory
        run_dir.write_exit_code(code)
        then(run_dir)

    return end


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda run_dir: None, 0),
        (failed(66), 66),
        (failed(75, 70), 70),
        (failed(75, -15), 75),
        (failed(-9), 75),
        (signalled(signal.SIGUSR1), 75),
        (signalled(signal.SIGINT), 130),
        (writing(74, failed(75)), 74),
        (writing(3, failed(3)), 3),
        (writing(75, signalled(signal.SIGTERM)), 75),
    ],
)
@pytest.mark.parametrize("before", [None, 0, 77])
def test_the_code_of_the_run(
    end: End, code: int, before: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """before: the end of an earlier run in that directory, which must not count for this one."""
    run_dir = RunDirectory(tmp_path / "run")
    if before is not None:
        run_dir.write_exit_code(before)

    def torchrun(words: list[str]) -> None:
        assert "SIGUSR1" in words[words.index("--signals-to-handle") + 1]
        assert words[-4:] == ["-m", "sarathi_pp", "generate", "--strict"]
        end(run_dir)

    monkeypatch.setattr(torchrun_agent, "torchrun", torchrun)
    assert torchrun_agent.run_agent(["generate", "--strict"], run_dir) == code
    os.kill(os.getpid(), signal.SIGTERM)  # too late: the process ends with that code


@pytest.mark.parametrize("error", [RendezvousTimeoutError("too late"), DistNetworkError("no way there")])
def test_nodes_that_do_not_find_each_other(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def torchrun(words: list[str]) -> None:
        raise error

    monkeypatch.setattr(torchrun_agent, "torchrun", torchrun)
    with pytest.raises(ConfigError, match="did not come together"):
        torchrun_agent.run_agent(["generate"], RunDirectory(tmp_path))
