"""torchrun on this node, with the exit code of the run. torchrun itself returns 1 for every failure.

torchrun runs inside this process and not as a child of it. So a signal reaches torchrun's agent exactly once, whether a
batch system signals only the process that it started, or all processes of a job. torchrun takes its options from its
own environment variables, PET_NNODES and so on.
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

# Signals that torchrun handles. It passes the first one on to the ranks.
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def run_agent(arguments: Sequence[str], run_dir: RunDirectory) -> int:
    """Run `sarathi-pp ARGUMENTS` as this node's ranks. Return the run's exit code, as far as this node knows it.

    Args:
        run_dir: directory of the run. If rank 0 writes an exit code there, that code is returned. It names the cause,
            which the exit codes of this node's ranks may not do.

    Raises:
        ConfigError: the nodes did not find each other.
    """
    before = run_dir.end_mark()
    rank = (sys.executable, "-P", "-m", "sarathi_pp", *arguments)
    try:
        try:
            torchrun(["--signals-to-handle", _SIGNALS, "--no-python", *rank])
        finally:
            ignore_signals()  # torchrun's handlers stay, and would raise while this process exits
        # This node's ranks also end with 0 if another node got the signal that stopped the run, or if input lines
        # failed. Then only the code that rank 0 has written shows this.
        code = EXIT_OK
    except ChildFailedError as error:
        code = _cause(failure.exitcode for failure in error.failures.values())
    except SignalException as error:
        code = StoppedError.by(error.sigval, "the run").exit_code
    except (RendezvousError, DistError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"the nodes did not come together: {reason}; start all nodes with the same rendezvous and number of nodes"
        ) from error
    written = run_dir.read_exit_code() if run_dir.end_mark() != before else None
    return code if written is None else written


def _cause(codes: Iterable[int]) -> int:
    """Return the exit code that names the cause of a failure, from the exit codes of this node's ranks.

    After the failure of one rank, the others end with 75 (a lost rank), or torchrun kills them. So only other codes
    name the cause. Without such a code, return 75.

    Args:
        codes: exit codes of the ranks. The code of a killed rank is the negative number of the signal.
    """
    causes = [code for code in codes if code > 0 and code != PeerLostError.exit_code]
    return causes[0] if causes else PeerLostError.exit_code
