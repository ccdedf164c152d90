"""The findings of `sarathi-pp doctor`: the parts that a run on this machine would use, and why not the other parts.

Parts are devices, kernels, transports and packages. The findings come from the code that makes the choices in a run. No
model is run. Each finding has one of four states:

    used       a run uses it
    unused     a run does not use it, or it does not exist here
    doubtful   a run uses it and starts, but it is not supported
    refused    a run would end with this error and its exit code
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from packaging.requirements import Requirement

import sarathi_pp
from sarathi_pp.checkpoint.checksums import verify_checksums
from sarathi_pp.checkpoint.entries import loaded_bytes, stays_coded, stored_bytes, weight_entries
from sarathi_pp.checkpoint.facts.config_file import ConfigFile
from sarathi_pp.checkpoint.facts.layer_cache import state_bytes, token_values
from sarathi_pp.checkpoint.facts.support import WHY_NO_PREFIX_CACHE, ModelFacts, check_model
from sarathi_pp.checkpoint.fetch import find_model
from sarathi_pp.checkpoint.files import open_checkpoint
from sarathi_pp.checkpoint.quantised.parts import Entry
from sarathi_pp.config import RunConfig
from sarathi_pp.distributed.devices import DeviceInfo, choose_device, describe_device
from sarathi_pp.distributed.environment import RankEnvironment, expected_environment
from sarathi_pp.distributed.network_interface import choose_interface
from sarathi_pp.distributed.transport import Transport, choose_transport, has_gloo, has_nccl
from sarathi_pp.errors import EXIT_OK, SarathiError
from sarathi_pp.inputs.generation_config import read_generation_config
from sarathi_pp.model.attention import BACKENDS, Needs, choose_backend, why_not
from sarathi_pp.model.batch_invariant import has_equal_decodes
from sarathi_pp.model.dtypes import Dtypes, choose_dtypes, why_slow
from sarathi_pp.model.fuse.float_linear import has_float_gemm
from sarathi_pp.model.fuse.packed_linear import has_gemm, has_onednn, product_name
from sarathi_pp.model.memory import in_gib
from sarathi_pp.model.state.choice import state_widths, why_not_numba
from sarathi_pp.model.triton_available import why_no_kernels
from sarathi_pp.process.host import cpu_quota
from sarathi_pp.stages.capacity import DeviceMemory, count_pages, kv_budget_bytes, resolve_limits
from sarathi_pp.text.tokenizer import Tokenizer, has_tokenizer
from sarathi_pp.wire.shared_memory import can_share

SCHEMA = 1
# Tokens per KV page, the default of most attention backends.
_PAGE_SIZE = 16

State = Literal["used", "unused", "doubtful", "refused"]
# Optional packages, by import name: the purpose of each, and the command that installs it.
_OPTIONAL = {
    "numba": ("kernels on CPU", "pip install 'sarathi-pp[cpu]'"),
    "triton": ("kernels on CUDA", "pip install 'sarathi-pp[gpu]'"),
    "flash_attn": ("--attention flash", "pip install 'sarathi-pp[flash]'"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        topic: the group of the checked part, such as "transport".
        name: the name of the checked part, such as "nccl".
        detail: the result, for people.
        exit_code: the exit code of a refused run, otherwise 0.
    """

    topic: str
    name: str
    state: State
    detail: str
    exit_code: int = EXIT_OK


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings about this machine and, if it was named, a model."""

    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0 if a run can start, otherwise the exit code of the first refused finding."""
        return next((one.exit_code for one in self.findings if one.state == "refused"), EXIT_OK)

    def document(self) -> dict[str, Any]:
        """Return all findings as the contents of a JSON document."""
        return {
            "schema": SCHEMA,
            "sarathi_pp": sarathi_pp.__version__,
            "exit_code": self.exit_code,
            "findings": [asdict(one) for one in self.findings],
        }


def diagnose(model: str | None = None, *, verify: bool = False) -> Diagnosis:
    """Check this machine and, if it is named, a model.

    Args:
        model: a directory or a Hub id; None to check no model.
        verify: read the model's weight files completely, and compare their checksums.
    """
    facts: list[ModelFacts] = []
    looked_at = list(_model(model, facts.append, verify=verify)) if model is not None else []
    device = choose_device("auto", RankEnvironment())
    return Diagnosis(
        (
            *_software(),
            *_devices(device),
            *_attention(device, _needs(facts[0], device) if facts else None),
            *_kernels(device),
            *_transport(device),
            *_host(device),
            *_packages(device),
            *looked_at,
            *(_dtype(one, device) for one in facts),
            *(_prefix_cache(one, device) for one in facts),
            *(_kv_pages(one, device) for one in facts),
            *(finding for one in facts if one.has_states for finding in _states(one, device)),
        )
    )


def _asked(topic: str, name: str, work: Callable[[], str], state: State = "used") -> Finding:
    """Return a finding with the result of `work`, or a refused one with the error that it raises.

    A failed import or file access gets the exit code of an internal error, with which it would end a run.

    Args:
        work: makes the check, and returns the text of the result.
        state: state of the finding if `work` raises no error.
    """
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
            yield Finding(
                "software", name, "used", f"{found}. sarathi-pp is not installed, so the supported versions are unknown"
            )
        elif window.specifier.contains(found, prereleases=True):
            yield Finding("software", name, "used", f"{found}; supported: {window.specifier}")
        else:
            yield Finding("software", name, "doubtful", f"{found} is not supported. Supported: {window.specifier}")


def _windows() -> dict[str, Requirement]:
    """Return the required versions of each package that sarathi-pp needs, by the package's name.

    Packages of its extras are left out. The result is empty if sarathi-pp is not installed.
    """
    try:
        lines = requires("sarathi-pp") or []
    except PackageNotFoundError:
        return {}
    return {one.name: one for one in map(Requirement, lines) if one.marker is None}


def _devices(device: torch.device) -> Iterator[Finding]:
    yield Finding("devices", "cpu", "used" if device.type == "cpu" else "unused", platform.machine())
    if not torch.cuda.is_available():
        lacks = "torch is built without CUDA" if torch.version.cuda is None else "torch finds no device or driver"
        yield Finding("devices", "cuda", "unused", lacks)
    for index in range(torch.cuda.device_count()):
        one = torch.cuda.get_device_properties(index)
        detail = f"{one.name}, compute capability {one.major}.{one.minor}, {in_gib(one.total_memory)}"
        yield Finding("devices", f"cuda:{index}", "used", detail)


def _dtypes(facts: ModelFacts, device: torch.device) -> Dtypes:
    return choose_dtypes("auto", facts.dtype, device.type)


def _dtype(facts: ModelFacts, device: torch.device) -> Finding:
    """Return the finding about the float type in which a run computes by default."""
    dtypes = _dtypes(facts, device)
    if device.type == "cpu" and (slow := why_slow(dtypes)):
        return Finding("model", "dtype", "doubtful", slow)
    held = "" if dtypes.weights == dtypes.compute else f"; weights stay in {dtypes.weights}, because this CPU has no"
    held += f" fast products in {dtypes.weights}" if held else ""
    products = product_name(getattr(torch, dtypes.compute), device)
    return Finding("model", "dtype", "used", f"computes in {dtypes.compute} by products of {products}{held}")


def _prefix_cache(facts: ModelFacts, device: torch.device) -> Finding:
    """Return the finding about the KV pages that requests share by default."""
    if facts.has_states:
        return Finding("model", "prefix cache", "unused", f"off: {WHY_NO_PREFIX_CACHE}")
    dtype: torch.dtype = getattr(torch, _dtypes(facts, device).compute)

    def mode() -> str:
        attention = choose_backend("auto", device, None, _needs(facts, device)).name
        if has_equal_decodes(dtype, attention, product_name(dtype, device)):
            return "all: pages of prompts and outputs, since decodes write the bits of prompt chunks"
        return "prompts: pages of prompts alone, since decodes may write other last bits"

    return _asked("model", "prefix cache", mode)


def _kv_pages(facts: ModelFacts, device: torch.device) -> Finding:
    """Return the finding about the memory of a token in KV pages."""
    dtype: torch.dtype = getattr(torch, _dtypes(facts, device).compute)
    layers = [token_values([cache]) for cache in facts.caches]
    paged = [values for values in layers if values]
    each = "" if len(set(paged)) > 1 else f", {paged[0]:,} in each of {len(paged)} layers" if paged else ""
    detail = f"a token takes {sum(layers):,} values{each}: {sum(layers) * dtype.itemsize / 1024:,.4g} KiB"
    if paged:
        detail += f", or {sum(layers) / 1024:,.4g} KiB with --kv-cache-dtype fp8, which changes answers"
    return Finding("model", "KV pages", "used", detail)


def _states(facts: ModelFacts, device: torch.device) -> Iterator[Finding]:
    """Yield findings about layers with a state: their backend, and the memory of their states.

    The memory is that of all sequences that may run at once, by default and in one stage. The finding is refused if
    there is no room for them.
    """
    dtype: torch.dtype = getattr(torch, _dtypes(facts, device).compute)
    config, each = RunConfig(model=""), state_bytes(facts.caches, dtype.itemsize)
    limits = resolve_limits(config, facts, 1, (), _PAGE_SIZE)

    def room() -> str:
        budget = kv_budget_bytes(config, DeviceMemory.of(device), {})
        count_pages(budget, facts, (0, facts.num_layers), limits, dtype)
        return (
            f"{each / 2**20:,.4g} MiB per sequence. With one stage, {limits.num_slots} sequences (--max-num-seqs) take "
            f"{in_gib(limits.num_slots * each)} of {in_gib(budget)} for states and KV pages"
        )

    yield _asked("model", "states", room)
    reason = why_not_numba(dtype, device, state_widths(facts.caches))
    same = "numba: any cut of a prompt gives the same bits"
    detail = same if reason is None else f"torch, because numba's kernels are not used: {reason}"
    yield Finding("model", "state backend", "used", detail)


def _needs(facts: ModelFacts, device: torch.device) -> Needs:
    compute = getattr(torch, _dtypes(facts, device).compute)
    return Needs(compute, facts.head_dim, facts.softcap, facts.sinks, facts.latent)


def _attention(device: torch.device, needs: Needs | None) -> Iterator[Finding]:
    """Yield one finding for each attention backend.

    Args:
        needs: requirements of the model; None without a model.
    """
    chosen = _asked("attention", "auto", lambda: choose_backend("auto", device, None, needs).name)
    if chosen.state == "refused":
        yield chosen
    for name in BACKENDS:
        reason = why_not(name, device, needs)
        used = chosen.state == "used" and name == chosen.detail
        detail = f"the first backend that runs on {device.type}" if used else f"{chosen.detail} comes first"
        yield Finding("attention", name, "used" if used else "unused", reason or detail)


def _kernels(device: torch.device) -> Iterator[Finding]:
    reason = why_no_kernels(device)
    yield Finding(
        "kernels",
        "Triton's",
        "unused" if reason else "used",
        reason or "for norms, rotary embeddings, gates and sampling",
    )
    on_cpu = device.type == "cpu"
    if has_gemm():
        yield Finding("kernels", "numba's", "used" if on_cpu else "unused", "for bfloat16 linear layers on CPU")
    else:
        lacks = "needs the package numba" if find_spec("numba") is None else "the processor has no AVX512-BF16"
        yield Finding("kernels", "numba's", "unused", f"for bfloat16 linear layers on CPU: {lacks}")
    if has_float_gemm():
        yield Finding("kernels", "numba's", "used" if on_cpu else "unused", "for float32 linear layers on CPU")
    else:
        lacks = "needs the package numba" if find_spec("numba") is None else "the processor has no AVX2"
        yield Finding("kernels", "numba's", "unused", f"for float32 linear layers on CPU: {lacks}")
    state: State = "used" if on_cpu and has_onednn() and not has_gemm() else "unused"
    detail = (
        "for bfloat16 linear layers that numba's kernels cannot compute"
        if has_onednn()
        else "torch is built without oneDNN, or has no such products for this processor"
    )
    yield Finding("kernels", "oneDNN's", state, detail)


def _transport(device: torch.device) -> Iterator[Finding]:
    """Yield one finding for each transport between stages on this machine. If it has GPUs, each stage uses one."""
    host, gpus = platform.node(), torch.cuda.device_count() if device.type == "cuda" else 0
    devices = [describe_device(torch.device("cuda", index), host, nccl=has_nccl()) for index in range(gpus)]
    chosen = choose_transport(devices if gpus > 1 else [*devices, DeviceInfo(host, None, nccl=False)] * 2)
    if not has_gloo():
        lacks = "torch is built without gloo, which the ranks need to start together"
        yield Finding("transport", "gloo", "refused", lacks, SarathiError.exit_code)
    else:
        yield Finding("transport", "gloo", "used", _carried(chosen, on_cpu=device.type == "cpu"))
    shares = device.type == "cpu" and can_share()
    why_not = "stages compute on GPUs" if device.type != "cpu" else "processes here cannot reach each other's sockets"
    detail = "carries frames and activations between stages of this host" if shares else why_not
    yield Finding("transport", "shared memory", "used" if shares else "unused", detail)
    if chosen.name == "nccl":
        yield Finding("transport", "nccl", "used", f"carries activations: {chosen.reason}")
    else:
        yield Finding("transport", "nccl", "unused", chosen.reason if has_nccl() else "torch is built without NCCL")


def _carried(chosen: Transport, *, on_cpu: bool) -> str:
    """Return a text about the data that gloo carries if this transport is chosen for activations."""
    if chosen.name != "gloo":
        return "carries frames"
    return (
        "carries all data that shared memory does not carry"
        if on_cpu
        else f"carries frames and activations: {chosen.reason}"
    )


def _host(device: torch.device) -> Iterator[Finding]:
    def interface() -> str:
        found = choose_interface(expected_environment())
        return f"{found.name} ({found.address})"

    yield _asked("host", "interface", interface)
    threads = {count: RankEnvironment(world_size=count, local_world_size=count).num_threads() for count in (1, 2)}
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota()
    limit = f", of which a cgroup allows {quota:g}" if quota is not None and quota < cores else ""
    shared = f"threads: {threads[1]} for a single stage, {threads[2]} for each of two stages"
    yield Finding("host", "cores", "used", f"{cores}{limit}; {shared}")
    memory = DeviceMemory.of(device)
    budget = in_gib(kv_budget_bytes(RunConfig(model=""), memory, {}))
    tightest = min(memory.pools, key=lambda pool: pool.free_bytes)
    free = f"{in_gib(tightest.free_bytes)} free in {tightest.title}"
    yield Finding("host", "memory", "used", f"{free}; KV pages and states of a stage get {budget}")


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


def _sizes_as_stored(entries: Mapping[str, Entry], dtype: str) -> str:
    """Return what the weights take if they stay as stored on a GPU, as the end of a sentence; empty if none can.

    Args:
        entries: the weights of the model by name.
        dtype: float type of the others.
    """
    kept = [(entry, stays_coded(key, entry)) for key, entry in entries.items()]
    if not any(stays for _, stays in kept):
        return ""
    num_bytes = sum(stored_bytes(entry) if stays else loaded_bytes(entry, dtype) for entry, stays in kept)
    return f"; {in_gib(num_bytes)} with --weights stored on a GPU, plus the largest weight expanded on each"


def _model(name: str, told: Callable[[ModelFacts], None], *, verify: bool) -> Iterator[Finding]:
    """Yield the findings about a model, up to the first refused one.

    Args:
        told: receives the facts of a supported model, because other checks need them.
        verify: compare the checksums of the weight files too.
    """
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
        directory, facts = directories[0], known[0]
        named = weight_entries(ConfigFile.read(directory), open_checkpoint(directory))
        entries = named.values()
        stored = in_gib(sum(map(stored_bytes, entries)))
        if facts.quantised is None:
            return f"{stored} in {facts.dtype}, divided among the stages"
        loaded = in_gib(sum(loaded_bytes(entry, facts.dtype) for entry in entries))
        text = f"{stored} stored as {facts.quantised}; {loaded} in {facts.dtype}, divided among the stages"
        return text + _sizes_as_stored(named, facts.dtype)

    def tokenizer() -> str:
        defaults = read_generation_config(directories[0])
        if not has_tokenizer(directories[0]):
            return "no files, so prompts must be token ids, and outputs have no text"
        Tokenizer.load(directories[0], vocab_size=known[0].vocab_size, eos_token_ids=defaults.eos_token_ids)
        return f"{known[0].vocab_size} tokens"

    def sums() -> str:
        verify_checksums(directories[0])
        return "equal to the published checksums"

    steps = {"files": files, "architecture": architecture, "weights": weights, "tokenizer": tokenizer}
    for title, work in {**steps, **({"sha256": sums} if verify else {})}.items():
        finding = _check_used(_asked("model", title, work), directories)
        yield finding
        if finding.state == "refused":
            return


def _check_used(finding: Finding, directories: Sequence[Path]) -> Finding:
    """Return the finding, or one about a tokenizer that is not used, if the model's directory has no files for it."""
    if finding.name != "tokenizer" or finding.state != "used" or has_tokenizer(directories[0]):
        return finding
    return replace(finding, state="unused")
