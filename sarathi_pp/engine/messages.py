"""What rank 0 and the leaders of other replicas tell each other, as texts: plain JSON, never pickle.

rank 0 -> leader   Ask: answer this request      Stop: begin nothing more, the run was told to stop
                   Abort: forget every request asked so far
leader -> rank 0   Answer, Failure: how a request ended      Watch: how far the replica is
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sarathi_pp.config import SamplingParams
from sarathi_pp.core.request import Completion, Request
from sarathi_pp.engine.progress import Snapshot
from sarathi_pp.errors import ProtocolError, RowError


@dataclass(frozen=True, slots=True)
class Ask:
    """arrival_s: on rank 0's clock."""

    request: Request


@dataclass(frozen=True, slots=True)
class Stop:
    """number: of the signal. left_s: in which what runs may be finished; None without a bound."""

    number: int
    left_s: float | None


@dataclass(frozen=True, slots=True)
class Abort:
    """The call that asked ended by an exception. Answers already on their way may still come."""


@dataclass(frozen=True, slots=True)
class Answer:
    """completion.request is the one that the text names: the receiver knows it."""

    index: int
    token_ids: tuple[int, ...]
    finish_reason: str
    num_preemptions: int
    metrics: Mapping[str, object]

    @classmethod
    def of(cls, completion: Completion, metrics: Mapping[str, object]) -> Answer:
        index, reason = completion.request.index, completion.finish_reason
        return cls(index, completion.token_ids, reason, completion.num_preemptions, metrics)

    def completion(self, request: Request) -> Completion:
        assert request.index == self.index
        return Completion(request, self.token_ids, self.finish_reason, self.num_preemptions)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Failure:
    index: int
    code: str
    message: str

    @property
    def error(self) -> RowError:
        return RowError(self.code, self.message)


@dataclass(frozen=True, slots=True)
class Watch:
    snapshot: Snapshot


Errand = Ask | Stop | Abort | Answer | Failure | Watch


def encode(errand: Errand) -> bytes:
    fields = asdict(errand)
    if isinstance(errand, Ask):
        fields["request"]["prompt_token_ids"] = list(errand.request.prompt_token_ids)
    return json.dumps([type(errand).__name__.lower(), fields], separators=(",", ":")).encode()


def decode(text: bytes) -> Errand:
    """decode(encode(x)) == x. Raises ProtocolError for any other text."""
    try:
        kind, fields = json.loads(text)
        return _restore(kind, fields)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError, RowError) as error:
        raise ProtocolError(f"a text of {len(text)} bytes is no errand: {error}") from error


def _restore(kind: str, fields: dict[str, Any]) -> Errand:
    match kind:
        case "ask":
            request = fields["request"]
            sampling = SamplingParams(**request["sampling"])
            prompt, ends = array("i", request["prompt_token_ids"]), tuple(request["paragraph_ends"])
            return Ask(Request(request["index"], prompt, sampling, request["arrival_s"], ends))
        case "stop":
            return Stop(**fields)
        case "abort":
            return Abort(**fields)
        case "answer":
            return Answer(**{**fields, "token_ids": tuple(fields["token_ids"])})
        case "failure":
            return Failure(**fields)
        case "watch":
            found = fields["snapshot"]
            by_stage = {name: tuple(found[name]) for name in ("stage_busy", "stage_compute_s")}
            return Watch(Snapshot(**{**found, **by_stage}))
    raise ValueError(f"kind {kind!r}")
