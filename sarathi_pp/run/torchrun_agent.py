"""torchrun on this node, ending with the run's exit code; torchrun's own is 1 for every failure.

It is torchrun's program inside this process and not a child of it: whoever sends signals to the one process that it
has started, or to all of a job, reaches the agent once and by itself. What torchrun's options say comes from its own
environment variables, PET_NNODES and so on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import main as torchrun

from sarathi_pp.errors import EXIT_OK, ConfigError, PeerLostError, StoppedError
from sarathi_pp.outputs.run_directory import RunDirectory
from sarathi_pp.process.signals import ignore_signals

# Of torchrun. The first that comes is passed on to the ranks.
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def run_agent(arguments: Sequence[str], run_dir: RunDirectory) -> int:
    """Run `sarathi-pp ARGUMENTS` as this node's ranks; returns what the run ended with, as far as this node knows.

    run_dir: of the run. What rank 0 writes there says more than how a rank ended: it names the cause. Raises
    ConfigError where the nodes did not find each other.
    """
    before = run_dir.end_mark()
    rank = (sys.executable, "-P", "-m", "sarathi_pp", *arguments)
    try:
        try:
            torchrun(["--signals-to-handle", _SIGNALS, "--no-python", *rank])
        finally:
            ignore_signals()  # torchrun's handlers stay, and would raise while this process exits
        # As the other nodes' ranks end when the run was told to stop on one of them, or has rows that failed.
        code = EXIT_OK
    except ChildFailedError as error:
        code = _cause(failure.exitcode for failure in error.failures.values())
    except SignalException as error:
        code = StoppedError.by(error.sigval, "the run").exit_code
    except (RendezvousError, DistError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"the nodes did not come together: {reason}") from error
    written = run_dir.read_exit_code() if run_dir.end_mark() != before else None
    return code if written is None else written


def _cause(codes: Iterable[int]) -> int:
    """A lost peer is an echo, and so is who was killed, by torchrun too; any other code is a cause."""
    causes = [code for code in codes if code > 0 and code != PeerLostError.exit_code]
    return causes[0] if causes else PeerLostError.exit_code
