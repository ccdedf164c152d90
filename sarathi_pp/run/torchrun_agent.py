"""torchrun on this node, with the exit code of the run. torchrun itself returns 1 for every failure.

torchrun runs inside this process and not as a child of it. So a signal reaches torchrun's agent exactly once. The
sender may signal only the process that it started, or all processes of a job. torchrun takes its options from its own
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

# Signals that torchrun handles. It passes the first one on to the ranks.
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def run_agent(arguments: Sequence[str], run_dir: RunDirectory) -> int:
    """Run `sarathi-pp ARGUMENTS` as this node's ranks. Return the run's exit code, as far as this node knows it.

    Args:
        run_dir: directory of the run. The code that rank 0 writes there names the cause, so it wins over the codes of
            this node's ranks.

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
        # failed.
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
    """Return the first code that is a cause of the end; without one, the code of a lost peer.

    A lost peer is only an echo, and so is a killed rank, because torchrun kills ranks too. Other codes are causes.
    """
    causes = [code for code in codes if code > 0 and code != PeerLostError.exit_code]
    return causes[0] if causes else PeerLostError.exit_code
