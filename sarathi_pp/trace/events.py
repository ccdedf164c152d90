"""All kinds of events in a trace. Each event is a frozen value and one JSON line, `{"e": "compute", ...}`.

Every rank writes one file. It starts with TraceStart, and ends with TraceEnd unless the process was killed. It holds a
Compute for every microbatch, unless a Cut ends the recording early. Facts that only the coordinator knows are in rank
0's file. All reports are computed from these events alone.

Times are seconds on the monotonic clock of the rank that wrote the file. Only `Compute.issued_s`, which comes with the
microbatch, is on rank 0's clock. `clock_offset_s` converts between the two clocks:

    rank 0's time = local time + clock_offset_s        measured at both ends of the file, linear in between
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import isfinite
from operator import attrgetter
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

from sarathi_pp.config import PrefixCacheMode
from sarathi_pp.core.cost.model import Load
from sarathi_pp.core.pages import KVUse
from sarathi_pp.core.plan import IdleReason, MicroBatch
from sarathi_pp.core.request import FinishReason
from sarathi_pp.core.request_index import SEQUENCE_PATTERN, index_of
from sarathi_pp.errors import InputError

SCHEMA = "sarathi-pp/trace/2"

_SEQUENCE = re.compile(SEQUENCE_PATTERN)

CutReason = Literal["size", "queue"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStart:
    """The writer of this file, and the settings of the run that every report repeats.

    Attributes:
        at_s, unix_s: the same instant on the local monotonic clock and as unix time.
        layers: layers of the stage, [first, end), counted in the whole model.
        num_pages: number of KV pages of the stage.
        clock_uncertainty_s: half of the shortest round trip that measured the offset.
        replica: index of this pipeline among num_replicas. With several replicas, "rank 0" in this module means the
            rank that leads this replica.
        replica_offset_s: seconds to add to a time on that rank's clock to get the time on the run's clock.
        prefix_cache: mode of the prefix cache.
        issues_ahead: one more microbatch than `inflight` may be in flight. See Limits.
    """

    at_s: float
    unix_s: float
    rank: int
    stage: int
    num_stages: int
    layers: tuple[int, int]
    host: str
    pid: int
    device: str
    policy: str
    chunk_size: int
    inflight: int
    num_pages: int
    page_size: int
    clock_offset_s: float = 0.0
    clock_uncertainty_s: float = 0.0
    replica: int = 0
    num_replicas: int = 1
    replica_offset_s: float = 0.0
    prefix_cache: PrefixCacheMode = "off"
    issues_ahead: bool = False
    schema: str = SCHEMA

    @property
    def most_inflight(self) -> int:
        """Return the most microbatches in flight."""
        return self.inflight + self.issues_ahead


@dataclass(frozen=True, slots=True)
class Issued:
    """Rank 0: a microbatch left the coordinator.

    Attributes:
        text: the printed microbatch, such as m7[s3:256+128].
        prefill_tokens, decodes, decode_context, prefill_attention: see Load in core/cost/model.py.
        pages_used: number of KV pages in use now, with those of this microbatch.
        tokens_held: number of tokens in these pages.
        idle_pages, cached_tokens, resumed_tokens, evictions: see KVUse in core/pages.py.
    """

    microbatch: int
    at_s: float
    text: str
    prefill_tokens: int
    decodes: int
    decode_context: int
    prefill_attention: float
    pages_used: int
    tokens_held: int
    idle_pages: int = 0
    cached_tokens: int = 0
    resumed_tokens: int = 0
    evictions: int = 0

    @classmethod
    def of(cls, microbatch: MicroBatch, use: KVUse) -> Issued:
        load = Load.of(microbatch)
        return cls(
            microbatch.index,
            microbatch.issued_s,
            str(microbatch),
            load.prefill_tokens,
            load.decodes,
            load.decode_context,
            load.prefill_attention,
            *use,
        )

    @property
    def num_tokens(self) -> int:
        return self.prefill_tokens + self.decodes

    @property
    def load(self) -> Load:
        return Load(self.prefill_tokens, self.prefill_attention, self.decodes, self.decode_context)

    @property
    def sequences(self) -> list[int]:
        """Indices of the sequences in the microbatch."""
        return [index_of(line, choice) for line, choice in _SEQUENCE.findall(self.text)]

    @property
    def num_chunks(self) -> int:
        """Number of prefill chunks. Only they are printed with a length, as in s3:256+128."""
        return self.text.count("+")


@dataclass(frozen=True, slots=True)
class Starved:
    """Rank 0: no microbatch can be issued. It is written when the reason changes, and holds until the next Issued.

    Reasons:
        full: as many microbatches are in flight as are allowed.
        held: at least one microbatch per stage is in flight. The policy wants no more, though there is something to
            compute.
        no_arrivals: all requests that have arrived are finished.
        no_kv: requests wait, and too few KV pages are free.
        tokens_in_flight: every running sequence waits for its own last token. Or fewer microbatches than stages are in
            flight, and the policy wants nothing of what could be computed.
    """

    at_s: float
    reason: IdleReason


@dataclass(frozen=True, slots=True)
class Compute:
    """A stage ran its layers over one microbatch from start_s to end_s, receiving and sending excluded.

    Attributes:
        issued_s: time of issue on rank 0's clock.
        arrived_s: time when the input was complete on this rank.
        cpu_s: CPU time of the computing thread in the span; None if it means nothing (a GPU, an emulated stage).
        collective_s: seconds of the span in sums over the stage's ranks, including the wait for each other; None
            without tensor parallelism.
        mask_s: seconds of the span in which drawing waited for masks of grammars; None if no row has a grammar.
    """

    microbatch: int
    issued_s: float
    arrived_s: float
    start_s: float
    end_s: float
    cpu_s: float | None = None
    collective_s: float | None = None
    mask_s: float | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """The first stage computed the LM head of a microbatch, from the rows that the last stage sent.

    The fields are as in Compute, except arrived_s: the time when these rows were complete on the first stage.
    """

    microbatch: int
    arrived_s: float
    start_s: float
    end_s: float
    cpu_s: float | None = None
    mask_s: float | None = None


@dataclass(frozen=True, slots=True)
class SendWait:
    """The stage waited from start_s to end_s because no send buffer was free."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Returned:
    """Rank 0: the result of a microbatch came back from the last stage, or the first stage computed its LM head."""

    microbatch: int
    at_s: float


@dataclass(frozen=True, slots=True)
class RowRefused:
    """Rank 0: an input line was refused before it became a request. `code` is the error code in its output line."""

    at_s: float
    code: str


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """Rank 0: a request arrived. at_s is its arrival, from which latencies count, and not the time of writing."""

    index: int
    at_s: float
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """Rank 0: a request is done. It holds everything that the request's latencies need.

    Attributes:
        first_issue_s: time when its first chunk was issued; None if it never ran.
        first_token_s: time of the first output token; None without output.
        gaps_us: whole microseconds from each output token to the next, output_tokens - 1 of them. All are kept, since
            they take no more room than the printed microbatches that computed the tokens.
        cached_tokens: number of its prompt tokens that were found in the prefix cache when it first started.
    """

    index: int
    arrived_s: float
    first_issue_s: float | None
    first_token_s: float | None
    finished_s: float
    prompt_tokens: int
    output_tokens: int
    finish_reason: FinishReason
    preemptions: int = 0
    gaps_us: Sequence[int] = ()
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """The end of recording before the end of the run. Only Totals and TraceEnd are written after it.

    Reasons:
        size: the file has reached its largest size.
        queue: events came faster than the disk could write them.
    """

    reason: CutReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Rank 0: sums over the whole run. After a Cut, the other events cover only its first part.

    Attributes:
        requests: number of input lines, with those that were refused.
        failed: number of requests that got an error.
        prompt_tokens, output_tokens: tokens of the completed requests.
        first_issue_s, last_result_s: start and end of the run's window; None without a result.
    """

    microbatches: int
    requests: int
    completed: int
    failed: int
    prompt_tokens: int
    output_tokens: int
    first_issue_s: float | None
    last_result_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEnd:
    """The last line of a file whose process ended in order.

    Attributes:
        bytes_read: bytes of weights read at loading.
        graph_hits: number of microbatches that a CUDA graph ran; null without graphs.
        graph_misses: number of microbatches that fit no graph; null without graphs.
    """

    at_s: float
    clock_offset_s: float = 0.0
    clock_uncertainty_s: float = 0.0
    peak_rss_bytes: int | None = None
    bytes_read: int | None = None
    graph_hits: int | None = None
    graph_misses: int | None = None


Event = (
    TraceStart
    | Issued
    | Starved
    | Compute
    | Head
    | SendWait
    | Returned
    | RowRefused
    | RequestArrived
    | RequestFinished
    | Cut
    | Totals
    | TraceEnd
)

KINDS: dict[str, type[Event]] = {
    "start": TraceStart,
    "issued": Issued,
    "starved": Starved,
    "compute": Compute,
    "head": Head,
    "send_wait": SendWait,
    "returned": Returned,
    "refused": RowRefused,
    "arrived": RequestArrived,
    "finished": RequestFinished,
    "cut": Cut,
    "totals": Totals,
    "end": TraceEnd,
}

# Short JSON keys of the fields that are written for every microbatch. The key of any other field is its name.
_SHORT = {
    "microbatch": "m",
    "at_s": "t",
    "start_s": "b",
    "end_s": "f",
    "issued_s": "i",
    "arrived_s": "a",
    "cpu_s": "c",
    "collective_s": "o",
    "mask_s": "w",
    "text": "x",
    "prefill_tokens": "p",
    "decodes": "d",
    "decode_context": "dc",
    "prefill_attention": "pa",
    "pages_used": "kp",
    "tokens_held": "kt",
    "idle_pages": "ki",
    "gaps_us": "g",
}

# Fields that are not written if they have this value. So a trace without their feature has the form that it had before.
_OPTIONAL: dict[str, object] = {
    "mask_s": None,
    "prefix_cache": "off",
    "issues_ahead": False,
    **dict.fromkeys(("idle_pages", "cached_tokens", "resumed_tokens", "evictions"), 0),
}

# Written numbers never exceed these limits: int64, and integers that a float holds exactly.
_LARGEST_INT = 2**63 - 1
_LARGEST_EXACT = 2**53


def _is_int(value: object) -> bool:
    return type(value) is int and -_LARGEST_INT <= value <= _LARGEST_INT


def _is_number(value: object) -> bool:
    return (type(value) is float and isfinite(value)) or (type(value) is int and abs(value) <= _LARGEST_EXACT)


def _are_ints(value: object) -> bool:
    return type(value) is list and all(map(_is_int, value))


# For each type of a field: the check that a value read from JSON is legal.
_LEGAL: dict[object, Callable[[object], bool]] = {
    int: _is_int,
    bool: lambda value: type(value) is bool,
    float: _is_number,
    str: lambda value: type(value) is str,
    int | None: lambda value: value is None or _is_int(value),
    float | None: lambda value: value is None or _is_number(value),
    tuple[int, int]: lambda value: _are_ints(value) and len(value) == 2,  # type: ignore[arg-type]
    Sequence[int]: _are_ints,
    CutReason: lambda value: value in get_args(CutReason),
    IdleReason: lambda value: value in get_args(IdleReason),
    FinishReason: lambda value: value in get_args(FinishReason),
    PrefixCacheMode: lambda value: value in get_args(PrefixCacheMode),
}


class _Layout(NamedTuple):
    """The JSON form of one kind of event.

    Attributes:
        name: value of the key "e".
        fields: names of the fields.
        keys: their JSON keys.
        optional: the JSON keys that may be missing, with their value in that case.
        legal: a check for the value of each field.
        values: returns the values of all fields of an event.
    """

    name: str
    fields: tuple[str, ...]
    keys: tuple[str, ...]
    optional: dict[str, object]
    key_set: frozenset[str]
    legal: tuple[Callable[[object], bool], ...]
    values: Callable[[Event], tuple[object, ...]]

    @classmethod
    def of(cls, name: str, kind: type[Event]) -> _Layout:
        names = tuple(field.name for field in fields(kind))
        keys = tuple(_SHORT.get(field, field) for field in names)
        optional = {_SHORT.get(field, field): _OPTIONAL[field] for field in names if field in _OPTIONAL}
        types = get_type_hints(kind)
        legal = tuple(_LEGAL[types[one]] for one in names)
        # For one name, attrgetter returns a value and not a tuple.
        values = attrgetter(*names) if len(names) > 1 else lambda event: (getattr(event, names[0]),)
        return cls(name, names, keys, optional, frozenset(keys), legal, values)


_LAYOUTS = {kind: _Layout.of(name, kind) for name, kind in KINDS.items()}
_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def encode(event: Event) -> str:
    """Return an event as one line of JSON in ASCII, without the newline.

    Raises:
        ValueError: a time is not finite.
    """
    layout = _LAYOUTS[type(event)]
    written = {"e": layout.name, **dict(zip(layout.keys, layout.values(event), strict=True))}
    for key, usual in layout.optional.items():
        if written[key] == usual:
            del written[key]
    return _to_json(written)


def decode(line: str | bytes) -> Event:
    """Return the event of a line that `encode` wrote. Raises InputError for any other line."""
    try:
        data: Any = json.loads(line)
    except ValueError as error:
        raise InputError(f"not a line of JSON ({error}): {line[:80]!r}") from None
    if not isinstance(data, dict):
        raise InputError(f"not a trace event: {line[:80]!r}; expected an object with the key 'e'")
    name = data.pop("e", None)
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise InputError(f"unknown trace event {name!r}; known: {', '.join(KINDS)}")
    schema = data.get("schema", SCHEMA)
    if kind is TraceStart and schema != SCHEMA:
        raise InputError(
            f"trace schema is {schema!r:.40}; this version reads {SCHEMA!r}: use the version that wrote it"
        )
    layout = _LAYOUTS[kind]
    if layout.optional:
        data = layout.optional | data
    if data.keys() != layout.key_set:
        raise InputError(f"trace event {name!r} has the keys {sorted(data)}; expected {sorted(layout.keys)}")
    values = {}
    for field, key, legal in zip(layout.fields, layout.keys, layout.legal, strict=True):
        value = data[key]
        if not legal(value):
            raise InputError(f"trace event {name!r} has {value!r:.40} as {key!r} ({field}), which is not legal")
        values[field] = tuple(value) if type(value) is list else value
    build: Callable[..., Event] = kind
    return build(**values)
