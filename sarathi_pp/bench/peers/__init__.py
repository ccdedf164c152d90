"""Other engines that can do the same work, each a program that runs in that engine's own environment.

    sarathi-pp  --- requests, as JSON in a file --->  PYTHON PROGRAM FILE  --- answers, the last line of its output --->

A program imports its engine and nothing of sarathi_pp. It loads the model, warms up and times one call over all
prompts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from sarathi_pp.errors import ConfigError, MissingError

_HERE = Path(__file__).parent
Parameters = Mapping[str, str]
Environment = dict[str, str]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of an engine.

    Attributes:
        default: the value if the user gives none.
        choices: the legal values. If empty, every whole number of at least 1 is legal.
    """

    default: str
    choices: tuple[str, ...] = ()

    def check(self, where: str, value: str) -> None:
        """Check a value.

        Args:
            where: the option and the parameter, for the error.

        Raises:
            ConfigError: the value is not legal. The message names the legal ones.
        """
        if self.choices and value not in self.choices:
            raise ConfigError(f"{where} is {value!r}; it must be one of {', '.join(self.choices)}")
        if not self.choices and not (value.isdecimal() and int(value) > 0):
            raise ConfigError(f"{where} is {value!r}; it must be a whole number of at least 1")


@dataclass(frozen=True, slots=True)
class Peer:
    """Another engine that `bench --against` can run.

    Attributes:
        program: name of the file in this folder that runs the engine.
        own_environment: the engine has its own Python environment, PEERS_DIR/NAME, which launch/peers.sh makes. If
            False, it runs in the environment of sarathi_pp.
        environment: returns the environment variables to set, from the path of the engine's Python and its parameters.
        own_ranks: the program starts all processes of its pipeline. If False, torchrun starts them, unless the
            parameter `launch` says otherwise.
        pipeline_needs: a package that the engine needs only if it runs as a pipeline; None if it needs no such package.
    """

    name: str
    program: str
    own_environment: bool
    parameters: Mapping[str, Parameter]
    environment: Callable[[Path, Parameters], Environment]
    own_ranks: bool = False
    pipeline_needs: str | None = None


@dataclass(frozen=True, slots=True)
class PeerChoice:
    """A peer (another engine) with values for its parameters.

    Attributes:
        label: the peer as given on the command line, such as vllm-cpu:tokens=256,pp=2.
        parameters: values of all parameters, defaults included.
    """

    label: str
    peer: Peer
    parameters: Parameters

    def dtype(self, work: str) -> str:
        """Return the type that the engine computes in: its own parameter, or the type of the work."""
        return work if self.parameters["dtype"] == "auto" else self.parameters["dtype"]

    def python(self, peers_dir: Path) -> Path:
        """Return the path of the Python that runs the peer.

        Args:
            peers_dir: folder with the Python environments of other engines.

        Raises:
            MissingError: the peer's environment does not exist, or lacks a package.
        """
        needed = self.peer.pipeline_needs
        if not self.peer.own_environment:
            if needed is not None and self.parameters["pp"] != "1" and find_spec(needed) is None:
                raise MissingError(f"--against {self.label} needs {needed}\n  try  pip install {needed}")
            return Path(sys.executable)
        python = peers_dir / self.peer.name / "bin" / "python"
        if not python.exists():
            raise MissingError(
                f"--against {self.label}: {python} does not exist\n"
                f"  try  bash launch/peers.sh {self.peer.name} {peers_dir}"
            )
        return python

    def command(self, python: Path, asked: Path) -> list[str]:
        program = ["-P", str(_HERE / self.peer.program), str(asked)]
        ranks = self.parameters.get("pp", "1")
        own = ranks == "1" or self.peer.own_ranks
        if self.parameters.get("launch", "own" if own else "torchrun") == "own":
            return [str(python), *program]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--no-python"]
        return [str(python), *torchrun, str(python), *program]


def _vllm_environment(python: Path, parameters: Parameters) -> Environment:
    """Return environment variables for vLLM. They give each of its ranks an equal share of the cores.

    They also preload the allocator and the OpenMP runtime that vLLM's documentation recommends.
    """
    cores = sorted(os.sched_getaffinity(0))
    ranks = int(parameters["pp"])
    ends = [rank * len(cores) // ranks for rank in range(ranks + 1)]
    shares = [cores[begin:end] or [cores[begin]] for begin, end in pairwise(ends)]
    return {
        "PYTHONPATH": "",  # our own PYTHONPATH is for another Python
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, share)) for share in shares),
        "VLLM_CPU_KVCACHE_SPACE": parameters["kv"],
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": ":".join(str(path) for path in _preloaded(python)),
    }


_TCMALLOC = ("/usr/lib/*-linux-gnu/libtcmalloc_minimal.so.4", "/usr/lib64/libtcmalloc_minimal.so.4")


def _preloaded(python: Path) -> list[Path]:
    found = [next(Path("/").glob(pattern[1:]), None) for pattern in _TCMALLOC]
    openmp = python.parents[1] / "lib" / "libiomp5.so"
    return [path for path in (next(filter(None, found), None), openmp) if path is not None and path.exists()]


def _llama_environment(python: Path, parameters: Parameters) -> Environment:
    return {"PYTHONPATH": ""}  # our own PYTHONPATH is for another Python


def _no_environment(python: Path, parameters: Parameters) -> Environment:
    return {}


_DTYPES = ("auto", "float32", "bfloat16", "float16")

PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "vllm-cpu",
            "vllm_program.py",
            True,
            {
                "dtype": Parameter("auto", _DTYPES),
                "tokens": Parameter("512"),
                "pp": Parameter("1"),
                "launch": Parameter("own", ("own", "torchrun")),
                "kv": Parameter("4"),
                "prefix": Parameter("on", ("on", "off")),
            },
            _vllm_environment,
        ),
        Peer(
            "transformers",
            "transformers_program.py",
            False,
            {
                "dtype": Parameter("auto", _DTYPES),
                "batching": Parameter("padded", ("padded", "continuous")),
                "pp": Parameter("1"),
            },
            _no_environment,
            pipeline_needs="accelerate",
        ),
        Peer(
            "llama-cpp",
            "llama_program.py",
            True,
            {"dtype": Parameter("auto", (*_DTYPES, "q8_0"))},
            _llama_environment,
        ),
        Peer(
            "llama-cpp-native",
            "llama_program.py",
            True,
            {"dtype": Parameter("auto", (*_DTYPES, "q8_0")), "pp": Parameter("1")},
            _llama_environment,
            own_ranks=True,
        ),
    )
}


def parse_peer(text: str) -> PeerChoice:
    """Parse a peer with its parameters, NAME[:key=value,...].

    Raises:
        ConfigError: a name or a value is not legal. The message lists the legal ones.
    """
    name, _, rest = text.partition(":")
    peer = PEERS.get(name)
    if peer is None:
        raise ConfigError(f"--against {text}: {name!r} is not known; use one of {', '.join(PEERS)}")
    given = {}
    for pair in rest.split(",") if rest else []:
        key, equals, value = pair.partition("=")
        if not equals or key not in peer.parameters:
            raise ConfigError(
                f"--against {text}: {pair!r} is not one of {', '.join(peer.parameters)}, each as name=value"
            )
        peer.parameters[key].check(f"--against {text}: {key}", value)
        given[key] = value
    found = {**{key: parameter.default for key, parameter in peer.parameters.items()}, **given}
    if found.get("batching") == "continuous" and found["pp"] != "1":
        raise ConfigError(f"--against {text}: transformers' generate_batch has no pipeline; leave out pp")
    return PeerChoice(text, peer, found)
