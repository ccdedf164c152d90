"""Messages between rank 0 and the leaders (first ranks) of the other replicas.

rank 0 -> leader   Submit: answer this request       Stop: start no new request
                   Abort: forget every request submitted so far
leader -> rank 0   Result, RequestError: how a request ended       Progress: how far the replica is

Messages are plain JSON texts. They are never pickled, because unpickling a message can run code.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sarathi_pp.core.draw_rules import DrawRules
from sarathi_pp.core.plan import TokenLogprobs
from sarathi_pp.core.prompt_logprobs import PromptLogprobs
from sarathi_pp.core.request import Completion, Request
from sarathi_pp.engine.progress import Progress
from sarathi_pp.errors import ProtocolError, RowError
from sarathi_pp.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Submit:
    """A message of rank 0: answer this request. The request's arrival_s is a time on rank 0's clock."""

    request: Request


@dataclass(frozen=True, slots=True)
class Stop:
    """A message of rank 0: a signal stops the run, so start no new request."""

    number: int  # number of the signal
    left_s: float | None  # seconds to finish the running requests; None: no limit


@dataclass(frozen=True, slots=True)
class Abort:
    """A message of rank 0: forget every request so far, because the call that submitted them has raised an error.

    Results that are on their way at that moment still arrive at rank 0.
    """


@dataclass(frozen=True, slots=True)
class Result:
    """A message to rank 0: the answer to a request.

    Attributes:
        index: index of the request.
        metrics: seconds and counts of the request, for its output line.
        logprobs, prompt_logprobs, cached_tokens: see Completion.
    """

    index: int
    token_ids: tuple[int, ...]
    finish_reason: str
    num_preemptions: int
    metrics: Mapping[str, object]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    cached_tokens: int = 0

    @classmethod
    def of(cls, completion: Completion, metrics: Mapping[str, object]) -> Result:
        index, reason = completion.request.index, completion.finish_reason
        return cls(
            index,
            completion.token_ids,
            reason,
            completion.num_preemptions,
            metrics,
            completion.logprobs,
            completion.prompt_logprobs,
            completion.cached_tokens,
        )

    def completion(self, request: Request) -> Completion:
        assert request.index == self.index
        return Completion(
            request,
            self.token_ids,
            self.finish_reason,  # type: ignore[arg-type]
            self.num_preemptions,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            cached_tokens=self.cached_tokens,
        )


@dataclass(frozen=True, slots=True)
class RequestError:
    """A message to rank 0: the error with which a request ended.

    Attributes:
        index: index of the request.
        code, message: see RowError.
    """

    index: int
    code: str
    message: str

    @property
    def error(self) -> RowError:
        return RowError(self.code, self.message)


Message = Submit | Stop | Abort | Result | RequestError | Progress
# The name of each class of messages in the JSON text.
_KINDS = {Submit: "submit", Stop: "stop", Abort: "abort", Result: "result", RequestError: "error", Progress: "progress"}


def encode(message: Message) -> bytes:
    """Return the message as a JSON text, which `decode` reads."""
    fields = asdict(message)
    if isinstance(message, Progress):
        fields = {"progress": fields}
    elif isinstance(message, Submit):
        rules = message.request.rules
        fields["request"]["prompt_token_ids"] = list(message.request.prompt_token_ids)
        fields["request"]["rules"] = None if rules is None else rules.to_bytes().decode()
    elif isinstance(message, Result) and message.prompt_logprobs is not None:
        found = message.prompt_logprobs
        lists = (list(found.logprobs), list(found.top_ids), list(found.top_logprobs))
        fields["prompt_logprobs"] = [found.first, found.num_top, *lists]
    return json.dumps([_KINDS[type(message)], fields], separators=(",", ":")).encode()


def decode(text: bytes) -> Message:
    """Return the message of a text that `encode` wrote.

    Raises:
        ProtocolError: the text is not one that `encode` writes.
    """
    try:
        kind, fields = json.loads(text)
        return _restore(kind, fields)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError, RowError) as error:
        raise ProtocolError(
            f"a text of {len(text)} bytes between rank 0 and the leader of a replica is not a message: {error}"
        ) from error


def _restore(kind: str, fields: dict[str, Any]) -> Message:
    match kind:
        case "submit":
            request = fields["request"]
            sampling = SamplingParams(**request["sampling"])
            prompt, ends = array("i", request["prompt_token_ids"]), tuple(request["paragraph_ends"])
            rules = None if request["rules"] is None else DrawRules.from_bytes(request["rules"].encode())
            salt = request["cache_salt"]
            return Submit(Request(request["index"], prompt, sampling, request["arrival_s"], ends, rules, salt))
        case "stop":
            return Stop(**fields)
        case "abort":
            return Abort(**fields)
        case "result":
            logprobs = fields["logprobs"]
            if logprobs is not None:
                logprobs = tuple(TokenLogprobs(one, tuple(map(_pair, top))) for one, top in logprobs)
            prompt_logprobs = fields["prompt_logprobs"]
            if prompt_logprobs is not None:
                first, num_top, own, top_ids, tops = prompt_logprobs
                prompt_logprobs = PromptLogprobs(first, num_top, array("d", own), array("i", top_ids), array("d", tops))
            changed = {"token_ids": tuple(fields["token_ids"]), "logprobs": logprobs}
            return Result(**{**fields, **changed, "prompt_logprobs": prompt_logprobs})
        case "error":
            return RequestError(**fields)
        case "progress":
            counts = fields["progress"]
            by_stage = {name: tuple(counts[name]) for name in ("stage_busy", "stage_compute_s")}
            return Progress(**{**counts, **by_stage})
    raise ValueError(f"{kind!r} is no kind of message")


def _pair(items: list[Any]) -> tuple[int, float]:
    token_id, logprob = items
    return token_id, logprob
