"""What a run on this machine would use, and why not the rest: the code that chooses in a run is asked, nothing is run.

Each finding is in one of four states: `used` by a run as it is, there but `unused`, `doubtful` (a run starts, outside
what is supported), or `refused`, which is what a run would end with and its exit code.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from packaging.requirements import Requirement

import sarathi_pp
from sarathi_pp.config import RunConfig
from sarathi_pp.distributed.devices import DeviceInfo, choose_device, describe_device
from sarathi_pp.distributed.environment import RankEnvironment, expected_environment
from sarathi_pp.distributed.network_interface import choose_interface
from sarathi_pp.distributed.transport import Transport, choose_transport, has_gloo, has_nccl
from sarathi_pp.errors import EXIT_OK, SarathiError
from sarathi_pp.inputs.generation_config import read_generation_config
from sarathi_pp.model.attention import BACKENDS, Needs, choose_backend, why_not
from sarathi_pp.model.checkpoint.checksums import verify_checksums
from sarathi_pp.model.checkpoint.fetch import find_model
from sarathi_pp.model.checkpoint.files import open_checkpoint
from sarathi_pp.model.checkpoint.support import ModelFacts, check_model
from sarathi_pp.model.checkpoint.surplus import needed_tensors
from sarathi_pp.model.fuse.packed_linear import has_gemm, has_onednn
from sarathi_pp.model.memory import in_gib
from sarathi_pp.model.triton_available import why_no_kernels
from sarathi_pp.process.host import cpu_quota
from sarathi_pp.stages.capacity import kv_budget_bytes, pools_of
from sarathi_pp.text.tokenizer import Tokenizer
from sarathi_pp.wire.shared_memory import can_share

SCHEMA = 1

State = Literal["used", "unused", "doubtful", "refused"]
# A package that can be left out, by the name it is imported as: what it is for, and how it is installed.
_OPTIONAL = {
    "numba": ("kernels on CPU", "pip install 'sarathi-pp[cpu]'"),
    "triton": ("kernels on CUDA", "pip install 'sarathi-pp[gpu]'"),
    "flash_attn": ("--attention flash", "pip install 'sarathi-pp[flash]'"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """topic, name: what was looked at. detail: what was found, for people. exit_code: of what is refused, else 0."""

    topic: str
    name: str
    state: State
    detail: str
    exit_code: int = EXIT_OK


@dataclass(frozen=True, slots=True)
class Diagnosis:
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0 where a run can start, else that of the first finding that is refused."""
        return next((one.exit_code for one in self.findings if one.state == "refused"), EXIT_OK)

    def document(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "sarathi_pp": sarathi_pp.__version__,
            "exit_code": self.exit_code,
            "findings": [asdict(one) for one in self.findings],
        }


def diagnose(model: str | None = None, *, verify: bool = False) -> Diagnosis:
    """model: a directory or a Hub id, looked at too. verify: its weight files are read as a whole."""
    facts: list[ModelFacts] = []
    looked_at = list(_model(model, facts.append, verify=verify)) if model is not None else []
    device = choose_device("auto", RankEnvironment())
    return Diagnosis(
        (
            *_software(),
            *_devices(device),
            *_attention(device, _needs(facts[0]) if facts else None),
            *_kernels(device),
            *_transport(device),
            *_host(device),
            *_packages(device),
            *looked_at,
        )
    )


def _asked(topic: str, name: str, work: Callable[[], str], state: State = "used") -> Finding:
    """What the work says, or what it refuses; an import that fails would end a run as an internal error does."""
    try:
        return Finding(topic, name, state, work())
    except SarathiError as error:
        return Finding(topic, name, "refused", str(error), error.exit_code)
    except (ImportError, OSError) as error:
        return Finding(topic, name, "refused", f"{type(error).__name__}: {error}", SarathiError.exit_code)


def _software() -> Iterator[Finding]:
    yield Finding("software", "python", "used", platform.python_version())
    windows = _windows()
    for name in ("torch", "transformers"):
        found = torch.__version__ if name == "torch" else version(name)
        window = windows.get(name)
        if window is None:
            yield Finding("software", name, "used", f"{found}; sarathi-pp is not installed, so nothing says which fit")
        elif window.specifier.contains(found, prereleases=True):
            yield Finding("software", name, "used", f"{found}, supported are {window.specifier}")
        else:
            yield Finding("software", name, "doubtful", f"{found} is outside of what is supported: {window.specifier}")


def _windows() -> dict[str, Requirement]:
    """What the installed package requires, by name."""
    try:
        lines = requires("sarathi-pp") or []
    except PackageNotFoundError:
        return {}
    return {one.name: one for one in map(Requirement, lines) if one.marker is None}


def _devices(device: torch.device) -> Iterator[Finding]:
    yield Finding("devices", "cpu", "used" if device.type == "cpu" else "unused", platform.machine())
    if not torch.cuda.is_available():
        lacks = "torch is built without it" if torch.version.cuda is None else "torch finds no device or driver"
        yield Finding("devices", "cuda", "unused", lacks)
    for index in range(torch.cuda.device_count()):
        one = torch.cuda.get_device_properties(index)
        detail = f"{one.name}, compute capability {one.major}.{one.minor}, {in_gib(one.total_memory)}"
        yield Finding("devices", f"cuda:{index}", "used", detail)


def _needs(facts: ModelFacts) -> Needs:
    return Needs(getattr(torch, facts.dtype), facts.head_dim, facts.softcap, facts.sinks)


def _attention(device: torch.device, needs: Needs | None) -> Iterator[Finding]:
    """needs: of the model, where there is one."""
    chosen = _asked("attention", "auto", lambda: choose_backend("auto", device, None, needs).name)
    if chosen.state == "refused":
        yield chosen
    for name in BACKENDS:
        reason = why_not(name, device, needs)
        used = chosen.state == "used" and name == chosen.detail
        detail = f"the first of those that run on {device.type}" if used else f"comes after {chosen.detail}"
        yield Finding("attention", name, "used" if used else "unused", reason or detail)


def _kernels(device: torch.device) -> Iterator[Finding]:
    reason = why_no_kernels(device)
    yield Finding("kernels", "Triton's", "unused" if reason else "used", reason or "of norms, rotations, gates, draws")
    on_cpu = device.type == "cpu"
    if has_gemm():
        yield Finding("kernels", "numba's", "used" if on_cpu else "unused", "of bfloat16 linear layers on CPU")
    else:
        lacks = "needs the package numba" if find_spec("numba") is None else "the processor has no AVX512-BF16"
        yield Finding("kernels", "numba's", "unused", f"of bfloat16 linear layers on CPU: {lacks}")
    state: State = "used" if on_cpu and has_onednn() and not has_gemm() else "unused"
    detail = "of bfloat16 linear layers that numba's do not take" if has_onednn() else "torch has none here"
    yield Finding("kernels", "oneDNN's", state, detail)


def _transport(device: torch.device) -> Iterator[Finding]:
    """Of stages on this machine, one a GPU where there are any."""
    host, gpus = platform.node(), torch.cuda.device_count() if device.type == "cuda" else 0
    devices = [describe_device(torch.device("cuda", index), host, nccl=has_nccl()) for index in range(gpus)]
    chosen = choose_transport(devices if gpus > 1 else [*devices, DeviceInfo(host, None, nccl=False)] * 2)
    if not has_gloo():
        lacks = "this torch has none, and ranks agree over it"
        yield Finding("transport", "gloo", "refused", lacks, SarathiError.exit_code)
    else:
        yield Finding("transport", "gloo", "used", _carried(chosen, on_cpu=device.type == "cpu"))
    shares = device.type == "cpu" and can_share()
    why_not = "stages compute on GPUs" if device.type != "cpu" else "processes here cannot reach each other's sockets"
    detail = "frames and activations between stages of this host" if shares else why_not
    yield Finding("transport", "shared memory", "used" if shares else "unused", detail)
    if chosen.name == "nccl":
        yield Finding("transport", "nccl", "used", f"activations: {chosen.reason}")
    else:
        yield Finding("transport", "nccl", "unused", chosen.reason if has_nccl() else "this torch has none")


def _carried(chosen: Transport, *, on_cpu: bool) -> str:
    """By gloo."""
    if chosen.name != "gloo":
        return "frames"
    return "what no memory is shared for" if on_cpu else f"frames, and activations: {chosen.reason}"


def _host(device: torch.device) -> Iterator[Finding]:
    def interface() -> str:
        found = choose_interface(expected_environment())
        return f"{found.name} ({found.address})"

    yield _asked("host", "interface", interface)
    threads = {count: RankEnvironment(world_size=count, local_world_size=count).num_threads() for count in (1, 2)}
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota()
    limit = f", of which a cgroup allows {quota:g}" if quota is not None and quota < cores else ""
    shared = f"threads: {threads[1]} of a stage alone, {threads[2]} of two each"
    yield Finding("host", "cores", "used", f"{cores}{limit}; {shared}")
    budget = in_gib(kv_budget_bytes(RunConfig(model=""), device, {}))
    tightest = min(pools_of(device), key=lambda pool: pool.free_bytes)
    free = f"{in_gib(tightest.free_bytes)} free in {tightest.title}"
    yield Finding("host", "memory", "used", f"{free}; KV pages of a stage get {budget}")


def _packages(device: torch.device) -> Iterator[Finding]:
    serving = {"cpu": ("numba",), "cuda": () if why_no_kernels(device) else ("triton",)}[device.type]
    for name, (purpose, remedy) in _OPTIONAL.items():
        if find_spec(name) is None:
            yield Finding("packages", name, "unused", f"is not installed ({remedy}); for {purpose}")
            continue
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "of unknown version"
        yield Finding("packages", name, "used" if name in serving else "unused", f"{found}; for {purpose}")


def _model(name: str, told: Callable[[ModelFacts], None], *, verify: bool) -> Iterator[Finding]:
    """told: gets the facts of a model that is supported; what else is looked at needs them."""
    directories: list[Path] = []
    known: list[ModelFacts] = []

    def files() -> str:
        directories.append(find_model(name))
        return str(directories[0])

    def architecture() -> str:
        known.append(facts := check_model(directories[0]))
        told(facts)
        return f"{facts.architecture}, {facts.num_layers} layers, {facts.max_position_embeddings} positions"

    def weights() -> str:
        needed = sum(one.num_bytes for one in needed_tensors(open_checkpoint(directories[0])).values())
        return f"{in_gib(needed)} in {known[0].dtype}, shared out over the stages"

    def tokenizer() -> str:
        defaults = read_generation_config(directories[0])
        Tokenizer.load(directories[0], vocab_size=known[0].vocab_size, eos_token_ids=defaults.eos_token_ids)
        return f"{known[0].vocab_size} tokens"

    def sums() -> str:
        verify_checksums(directories[0])
        return "as published"

    steps = {"files": files, "architecture": architecture, "weights": weights, "tokenizer": tokenizer}
    for title, work in {**steps, **({"sha256": sums} if verify else {})}.items():
        finding = _asked("model", title, work)
        yield finding
        if finding.state == "refused":
            return
