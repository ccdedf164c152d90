"""A run as the user asked for it (RunConfig) and as it will happen (ResolvedRun). Frozen values, no I/O.

Resolving returns a new type instead of filling in blanks, so that a component that needs the page count
cannot be handed a configuration that does not have one yet.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, get_args

from sarathi_pp.errors import ConfigError, OptionError
from sarathi_pp.given_values import is_int, plain
from sarathi_pp.sampling_params import SAMPLING_ALIASES, SamplingParams

DTYPES = ("auto", "float32", "bfloat16", "float16")
WEIGHTS = ("dtype", "stored")
KV_CACHE_DTYPES = ("auto", "fp8")
# Other names of these values: those of other engines.
KV_CACHE_DTYPE_ALIASES = {"fp8_e4m3": "fp8"}
DEVICES = ("auto", "cpu", "cuda")
HEADS = ("auto", "last")
TRANSPORTS = ("auto", "gloo")
PrefixCacheMode = Literal["off", "prompts", "all"]
PREFIX_CACHES = ("auto", *get_args(PrefixCacheMode))
ORDERS = ("auto", "input", "prefix")
# The same names as in model/attention, which imports torch. A test compares the two.
ATTENTIONS = ("auto", "numba", "triton", "flash", "varlen", "sdpa")

# Other names of fields: those of the command's options and of other engines. Options and the Python API share them.
ALIASES = {
    "pipeline_parallel_size": "stages",
    "pp_size": "stages",
    "data_parallel_size": "replicas",
    "tp_size": "tensor_parallel_size",
    "max_num_batched_tokens": "chunk_size",
    "block_size": "page_size",
    "kv_cache_memory": "kv_cache_memory_bytes",
    "peer_timeout": "peer_timeout_s",
    "join_timeout": "join_timeout_s",
}
# Largest timeout that the user may set, in seconds: a week.
_LONGEST_S = 7 * 86400.0


_REALS = ("gpu_memory_utilization", "request_rate", "peer_timeout_s", "join_timeout_s")
# Endings of field names that the options leave out: the option of peer_timeout_s is --peer-timeout.
_UNITS_OF_FIELDS = ("_bytes", "_s")
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def size_in_bytes(text: str) -> int | None:
    """Return the bytes that a text such as 4GiB, 500MB or 1073741824 means. None if it is not a size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    size = float(match[1]) * {**_UNITS, **_BINARY}[match[2] or ""] if match else math.inf
    return int(size) if size < math.inf else None


def names_of(field_name: str) -> tuple[str, ...]:
    """Return all names of a field of RunConfig or SamplingParams, its own first."""
    aliases = {**ALIASES, **SAMPLING_ALIASES}
    return field_name, *(alias for alias, name in aliases.items() if name == field_name)


def options_of(field_name: str) -> tuple[str, ...]:
    """Return all options of a field, the main one first: `--page-size` and `--block-size` for page_size.

    The unit at the end of a field's name is left out: `--peer-timeout` for peer_timeout_s.
    """
    own, *others = names_of(field_name)
    names = others if own.endswith(_UNITS_OF_FIELDS) else (own, *others)
    return tuple(f"--{name.replace('_', '-')}" for name in names)


def option_of(field_name: str) -> str:
    """Return the command's option for a field."""
    return options_of(field_name)[0]


def _demand(legal: bool, name: str, value: object, allowed: str) -> None:
    if not legal:
        raise OptionError(name, option_of(name), value, allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run as the user asked for it. None means "choose for me".

    Args:
        model: model directory, or an id on the Hugging Face Hub.
        stages: pipeline stages of each replica.
        replicas: pipelines that share the requests.
        tensor_parallel_size: ranks that share each stage. Must divide the model's KV heads.
        policy: scheduling policy, as `name`, `name:key=value,...` or `package.module:Class`.
        chunk_size: most tokens in a microbatch. None: by the profile or the policy.
        max_num_seqs: most sequences that run at once in a replica. None: 64 per stage.
        max_model_len: most tokens of prompt and output together. None: the model's own limit.
        page_size: tokens per page of the KV cache. None: 16, or 256 for the attentions flash and varlen.
        kv_cache_memory_bytes: KV cache of each rank, in bytes or as text such as "4GiB". None: from free memory.
        kv_cache_dtype: float type of keys and values in the KV cache. "auto": dtype. "fp8": float8_e4m3fn without
            scales, one byte each. Rounding them changes answers.
        gpu_memory_utilization: share of a GPU's memory that a rank may use, in (0, 1].
        layer_split: layers per stage. None: equal time by the profile, else even. "even": equal layers.
        inflight: most microbatches at once in a replica. None: the number of stages, or one more.
        dtype: float type of the computation. "auto": that of the checkpoint, or float32 on a CPU that has no fast
            products in it.
        weights: form of quantised weights in memory. "dtype": they are dequantised to dtype when they are loaded.
            "stored": on GPUs, weights in FP8 and MXFP4 stay as they are stored, and products of more than 16 rows
            expand them.
        device: device that the stages compute on.
        attention: implementation of attention.
        request_rate: requests per second that arrive, as a Poisson process. inf: all at once.
        seed: seed of all sampling. A request draws from this and its id.
        peer_timeout_s: seconds of silence after which a stage counts as lost.
        join_timeout_s: seconds for all ranks to join. During set-up a rank may be silent, or do nothing, for the longer
            of both timeouts. Loading has no limit while a rank computes or reads.
        debug_nan: report the first stage whose output has NaN or infinity.
        enforce_eager: do not use CUDA graphs.
        head: stage of the LM head. "last": the last stage. "auto": on CPU the first stage may compute it too, if that
            makes the times of the stages more equal.
        prefix_cache: which KV pages later requests can share. "off": none. "prompts": pages of prompts. "all": pages of
            outputs too. "auto": "all" if a decode writes the same bits as a prompt chunk would, else "prompts"; "off"
            for a model whose layers keep states.
        order: order in which requests start. "input": that of the input. "prefix": prompts with equal beginnings follow
            each other. "auto": "prefix" if the prefix cache is on and the input is a file or a list that arrives at
            once.
        order_window: most requests that the order "prefix" reads ahead. None: 2048.
        transport: "auto": shared memory on CPUs of a host, NCCL on GPUs, else gloo. "gloo": gloo for everything.
        run_dir: directory for traces, report.json and exit_code. None: OUTPUT.run for a command, a temporary directory
            for an LLM.
        emulate: profile.json whose stage times are slept. No model runs.
        profile: profile.json of this model and machine. It decides layer_split, chunk_size and inflight if these are
            None.
        sampling_overrides: fields of SamplingParams that the command line named. The model's generation_config.json
            sets the other fields.
        override_generation_config: settings in the form of generation_config.json that win over the model's file.
        default_chat_template_kwargs: variables for the chat template. Those of a line win.

    Raises:
        OptionError: a value that its field does not take.
    """

    model: str
    stages: int = 1
    replicas: int = 1
    tensor_parallel_size: int = 1
    policy: str = "balanced"
    chunk_size: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    page_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    layer_split: tuple[int, ...] | Literal["even"] | None = None
    inflight: int | None = None
    dtype: str = "auto"
    weights: str = "dtype"
    device: str = "auto"
    attention: str = "auto"
    request_rate: float = math.inf
    seed: int = 0
    peer_timeout_s: float = 60.0
    join_timeout_s: float = 300.0
    debug_nan: bool = False
    enforce_eager: bool = False
    head: str = "auto"
    prefix_cache: str = "auto"
    order: str = "auto"
    order_window: int | None = None
    transport: str = "auto"
    run_dir: Path | None = None
    emulate: Path | None = None
    profile: Path | None = None
    sampling_overrides: dict[str, object] = field(default_factory=dict)
    override_generation_config: dict[str, object] = field(default_factory=dict)
    default_chat_template_kwargs: dict[str, object] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        return self.replicas * self.stages * self.tensor_parallel_size

    def __post_init__(self) -> None:
        self._convert()
        sizes = ("stages", "replicas", "tensor_parallel_size")
        for name in (*sizes, "chunk_size", "max_num_seqs", "max_model_len", "page_size", "inflight", "order_window"):
            value = getattr(self, name)
            absent = value is None and name not in sizes
            _demand(absent or (is_int(value) and value >= 1), name, value, "an integer of at least 1")
        for name in ("model", "policy", "attention"):
            _demand(isinstance(getattr(self, name), str), name, getattr(self, name), "a string")
        for name in ("run_dir", "emulate", "profile"):
            value = getattr(self, name)
            _demand(value is None or isinstance(value, Path), name, value, "a path")
        for name in ("debug_nan", "enforce_eager"):
            _demand(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        memory = self.kv_cache_memory_bytes
        _demand(
            memory is None or (is_int(memory) and memory >= 1),
            "kv_cache_memory_bytes",
            memory,
            "a size of at least one byte, like '4GiB', '500MB' or 1073741824",
        )
        stored = self.kv_cache_dtype
        _demand(stored not in DTYPES[1:], "kv_cache_dtype", stored, f"auto, which follows dtype={stored!r}, or fp8")
        chosen = {
            "dtype": DTYPES,
            "weights": WEIGHTS,
            "kv_cache_dtype": KV_CACHE_DTYPES,
            "device": DEVICES,
            "head": HEADS,
            "transport": TRANSPORTS,
            "attention": ATTENTIONS,
            "prefix_cache": PREFIX_CACHES,
            "order": ORDERS,
        }
        for name, choices in chosen.items():
            _demand(getattr(self, name) in choices, name, getattr(self, name), f"one of {', '.join(choices)}")
        window = self.order_window
        ordered = self.order == "prefix" or (self.order == "auto" and self.prefix_cache != "off")
        _demand(window is None or ordered, "order_window", window, "left out if rows keep the order of the input")
        split = self.layer_split
        _demand(
            split in (None, "even") or (isinstance(split, tuple) and all(map(is_int, split))),
            "layer_split",
            split,
            "one integer per stage, or 'even'",
        )
        _demand(is_int(self.seed) and -(2**63) <= self.seed < 2**63, "seed", self.seed, "a 64-bit integer")
        for name in ("sampling_overrides", "override_generation_config", "default_chat_template_kwargs"):
            _demand(isinstance(getattr(self, name), dict), name, getattr(self, name), "a dictionary")
        known = {one.name for one in fields(SamplingParams)}
        for name in self.sampling_overrides:
            _demand(name in known, "sampling_overrides", name, f"fields of SamplingParams ({', '.join(sorted(known))})")
        rate, share = self.request_rate, self.gpu_memory_utilization
        _demand(isinstance(rate, float) and rate > 0, "request_rate", rate, "above 0 (inf: all at once)")
        _demand(isinstance(share, float) and 0 < share <= 1, "gpu_memory_utilization", share, "a number in (0, 1]")
        for name in ("peer_timeout_s", "join_timeout_s"):
            seconds = getattr(self, name)
            legal = isinstance(seconds, float) and 0 < seconds <= _LONGEST_S
            _demand(legal, name, seconds, f"above 0 seconds and at most {_LONGEST_S:.0f}")

    def _convert(self) -> None:
        """Convert what Python programs naturally hold: paths as text, sizes with a unit, lists, numbers of numpy."""
        for one in fields(self):
            value = plain(getattr(self, one.name))
            if one.name in ("run_dir", "emulate", "profile") and isinstance(value, str) and value:
                value = Path(value)
            elif one.name == "kv_cache_dtype" and isinstance(value, str):
                value = KV_CACHE_DTYPE_ALIASES.get(value, value)
            elif one.name in _REALS and is_int(value):
                value = float(value)  # type: ignore[arg-type]
            elif one.name == "kv_cache_memory_bytes" and isinstance(value, str):
                size = size_in_bytes(value)
                value = value if size is None else size
            elif one.name == "layer_split" and not isinstance(value, str) and isinstance(value, Iterable):
                value = tuple(map(plain, value))
            object.__setattr__(self, one.name, value)


def stages_among(num_ranks: int, stages: int | None, replicas: int, tensor_parallel_size: int) -> int:
    """Return the number of stages of each replica, from the number of processes that torchrun started.

    Args:
        num_ranks: number of processes. Each one computes a stage, or a part of it with tensor parallelism.
        stages: number of stages that the user asked for; None accepts any number.

    Raises:
        ConfigError: the processes cannot be divided into these replicas and stages.
    """
    held = replicas * tensor_parallel_size
    if num_ranks % held:
        raise ConfigError(
            f"torchrun started {num_ranks} processes, and --replicas {replicas} with --tensor-parallel-size "
            f"{tensor_parallel_size} needs a multiple of {held}; start {held} processes for each stage"
        )
    if stages not in (None, num_ranks // held):
        asked = f"{stages} stages" if held == 1 else f"{replicas} x {stages} x {tensor_parallel_size} ranks"
        raise ConfigError(
            f"--stages is {stages}: the options need {asked}, and torchrun started {num_ranks} processes; leave "
            f"--stages out, or start {held * (stages or 1)} processes"
        )
    return num_ranks // held


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRun:
    """One run as it will happen: every choice made, the same on all ranks.

    Fields without a line here mean what they mean in RunConfig.

    Args:
        layers: [first, end) of each stage: global layer indices, contiguous.
        num_pages: KV pages of every stage's shard.
        kv_cache_dtype: float type of keys and values in the KV cache: that of dtype, or "fp8".
        max_microbatch_tokens: tokens of the largest microbatch that the policy can emit. It sizes the wire's buffers.
        request_rate: arrivals per second. None: all requests are there at the start.
        moves_head: the first stage has the LM head too, and computes it for some of the microbatches.
        prefix_cache: one of the modes, never "auto".
        issues_ahead: see Limits.
    """

    model: str
    policy: str
    layers: tuple[tuple[int, int], ...]
    chunk_size: int
    max_num_seqs: int
    max_model_len: int
    max_microbatch_tokens: int
    page_size: int
    num_pages: int
    inflight: int
    dtype: str
    kv_cache_dtype: str
    device: str
    attention: str
    seed: int
    peer_timeout_s: float
    request_rate: float | None = None
    replicas: int = 1
    tensor_parallel_size: int = 1
    moves_head: bool = False
    prefix_cache: PrefixCacheMode = "off"
    issues_ahead: bool = False

    @property
    def num_stages(self) -> int:
        return len(self.layers)

    @property
    def most_inflight(self) -> int:
        """Return the most microbatches in flight, with the one that is issued ahead."""
        return self.inflight + self.issues_ahead
