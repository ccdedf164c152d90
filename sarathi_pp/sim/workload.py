"""Workloads: the lengths and arrivals of many requests, from a text (SPEC) or from recorded requests.

Each request is made when it is needed. The texts are:

zipf:n=10000,min=1024,max=4096,theta=0.4,pd=10,seed=0
    SARATHI's (arXiv 2308.16369, section 5.3): total length min + k - 1 with a probability proportional to
    k^-theta, output max(1, round(length / (pd + 1))). The other tokens are the prompt
uniform:n=32,min=256,max=1024,pd=8,seed=0
    prompt length uniform from min to max, output max(1, prompt // pd). Or output=64 for all requests, or
    output=32,output_max=160 for output lengths uniform from 32 to 160
fixed:n=100,prompt=1024,output=128,seed=0
poisson:rate=7,SPEC
    the requests of SPEC with Poisson arrivals, `rate` per second; without poisson, all arrive at 0
then:SPEC+SPEC
    one workload after the other, as if the traffic changed during a run; with arrivals: poisson:rate=7,then:SPEC+SPEC

The first three take shared=1024,groups=8 too: each prompt then begins with the 1024 tokens of one of 8 groups. Groups
are equally large and come in random order. The lengths stay the same, so each prompt must be longer than `shared`. The
tokens of a group depend on its number and on `seed`, so workloads with the same seed have the same groups.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from sarathi_pp.core.request import Request
from sarathi_pp.errors import ConfigError
from sarathi_pp.sampling_params import SamplingParams

_VOCABULARY = 32_000
# Parameters that are numbers of tokens, and the most that they may be. It is more than any pipeline takes, and small
# enough for zipf, which makes a table of all lengths.
_TOKENS = {"min", "max", "prompt", "output", "output_max", "shared"}
_MOST = 10_000_000
# Most that the other whole numbers may be.
_LARGEST = 2**53
# Least prompt tokens per output token.
_LEAST_RATIO = 0.001
# Fewest arrivals per second: one in a lifetime.
_LEAST_RATE = 1e-9
Lengths = tuple[int, int]  # prompt and output tokens


class _Prefix(NamedTuple):
    """The tokens with which a prompt begins, drawn from their own seed. Other prompts may begin with them too."""

    seed: str
    num_tokens: int

    def draw(self, vocabulary: int) -> array[int]:
        """Return the token ids, below `vocabulary`."""
        rng = random.Random(self.seed) if self.num_tokens else random
        return array("i", rng.choices(range(vocabulary), k=self.num_tokens))


_NO_PREFIX = _Prefix("", 0)


def _no_prefixes() -> Iterator[_Prefix]:
    return itertools.repeat(_NO_PREFIX)


@dataclass(frozen=True, slots=True)
class Workload:
    """A number of requests with their lengths and arrivals.

    Attributes:
        spec: the text that describes it, for messages.
        max_tokens: most tokens of a request, prompt and output together.
        rate: arrivals per second. Infinite if all requests arrive at 0, or if `_arrivals` gives each arrival in
            seconds.
    """

    spec: str
    num_requests: int
    max_tokens: int
    rate: float
    _draw: Callable[[random.Random], Iterator[Lengths]]
    _seed: int
    _arrivals: Callable[[], Iterator[float]] | None = None
    _prefixes: Callable[[], Iterator[_Prefix]] = _no_prefixes

    @classmethod
    def recorded(
        cls,
        spec: str,
        num_requests: int,
        max_tokens: int,
        lengths: Callable[[], Iterator[Lengths]],
        arrivals: Callable[[], Iterator[float]] | None,
    ) -> Workload:
        """Return a workload of recorded requests, in order of arrival.

        Args:
            lengths: returns the numbers of prompt and output tokens, request by request.
            arrivals: returns the arrival of each request in seconds; None if all arrive at 0.
        """
        return cls(spec, num_requests, max_tokens, math.inf, lambda rng: lengths(), 0, arrivals)

    def lengths(self) -> Iterator[Lengths]:
        """Return the prompt and output lengths of the requests, the same every time."""
        return itertools.islice(self._draw(random.Random(self._seed)), self.num_requests)

    @property
    def has_arrivals(self) -> bool:
        """Return whether the workload has times of arrival. Otherwise all requests arrive at 0."""
        return math.isfinite(self.rate) or self._arrivals is not None

    @property
    def shares_prefixes(self) -> bool:
        """Return whether the workload has prompts that begin with the same tokens. Only a SPEC with `shared` has."""
        return self._prefixes is not _no_prefixes

    def repeated_tokens(self) -> Iterator[int]:
        """Yield, request by request, the number of first prompt tokens with which an earlier prompt began too."""
        seen: dict[str, int] = {}
        for prefix in itertools.islice(self._prefixes(), self.num_requests):
            before = seen.get(prefix.seed, 0)
            yield min(prefix.num_tokens, before)
            seen[prefix.seed] = max(prefix.num_tokens, before)

    def at_rate(self, rate: float) -> Workload:
        """Return the same requests with Poisson arrivals, `rate` per second. They replace any that the workload has."""
        return replace(self, rate=rate, _arrivals=None)

    @property
    def prompt_to_output(self) -> float:
        """Prompt tokens per output token (P:D) over the whole workload."""
        prompts, outputs = map(sum, zip(*self.lengths(), strict=True))
        return prompts / outputs

    def requests(self, *, token_ids: bool = True, vocabulary: int = _VOCABULARY) -> Iterator[Request]:
        """Yield the requests in order of arrival.

        Args:
            token_ids: draw random token ids below `vocabulary`. If False, all ids are 0, which is faster. All prompts
                then begin equally, so no prefix cache may see them.
        """
        ids, arrivals, prefixes = random.Random(self._seed + 1), self._arrival_times(), self._prefixes()
        for index, (prompt, output) in enumerate(self.lengths()):
            arrival_s, prefix = next(arrivals), next(prefixes)
            drawn = array("i", (0,)) * prompt
            if token_ids:
                drawn = prefix.draw(vocabulary)
                drawn.extend(ids.choices(range(vocabulary), k=prompt - prefix.num_tokens))
            sampling = SamplingParams(max_new_tokens=output, ignore_eos=True, seed=index)
            yield Request(index, drawn, sampling, arrival_s)

    def _arrival_times(self) -> Iterator[float]:
        if self._arrivals is not None:
            return self._arrivals()
        if math.isinf(self.rate):
            return itertools.repeat(0.0)
        gaps = random.Random(self._seed + 2)
        return itertools.accumulate(gaps.expovariate(self.rate) for _ in itertools.count())


def parse_workload(spec: str, recorded: Callable[[str], Workload | None] = lambda spec: None) -> Workload:
    """Return the workload that a text describes. The module docstring has the forms of the text.

    Args:
        recorded: called with a text that has none of these forms, such as the path of a file. It returns the workload,
            or None if there is none.

    Raises:
        ConfigError: a part of the text is wrong. The message gives the part and the legal values.
    """
    kind, _, rest = spec.partition(":")
    if kind == "poisson":
        first, _, inner = rest.partition(",")
        rate = _read(spec, first.split(","), {"rate": float})["rate"]
        if not rate >= _LEAST_RATE:
            raise ConfigError(f"{spec}: rate is {rate:g}; it must be at least {_LEAST_RATE:g} arrivals per second")
        workload = parse_workload(inner, lambda spec: _at_once(recorded(spec)))
        if math.isfinite(workload.rate):
            raise ConfigError(f"{spec}: rate is given twice, {rate:g} and {workload.rate:g}; leave one of them out")
        return replace(workload.at_rate(rate), spec=spec)
    if kind == "then":
        return _joined(spec, [parse_workload(part, recorded) for part in rest.split("+")])
    found = _named(spec, kind, rest) if kind in _KINDS else recorded(spec)
    if found is None:
        kinds = ", ".join([*_KINDS, "poisson", "then"])
        raise ConfigError(
            f"the workload {spec!r} is not known; give an existing file of requests, or one of {kinds}, as in fixed:n=9"
        )
    return found


def _at_once(workload: Workload | None) -> Workload | None:
    return None if workload is None else workload.at_rate(math.inf)


def _named(spec: str, kind: str, rest: str) -> Workload:
    defaults, build = _KINDS[kind]
    values: dict[str, float] = {
        **defaults,
        **_read(spec, rest.split(",") if rest else [], dict.fromkeys(defaults, float)),
    }
    for name, value in values.items():
        if name == "pd" and not _LEAST_RATIO <= value <= _MOST:
            raise ConfigError(f"{spec}: pd is {value:g}; it must be a number from {_LEAST_RATIO:g} to {_MOST:g}")
        least, real = 0 if name in _FROM_ZERO.get(kind, ()) else 1, name in ("theta", "pd")
        most = _MOST if name in _TOKENS else _LARGEST
        if name != "pd" and not (least <= value <= most and (real or value % 1 == 0)):
            kind_of = "number" if real else "whole number"
            raise ConfigError(f"{spec}: {name} is {value:g}; it must be a {kind_of} from {least} to {most:g}")
    if values.get("min", 1) > values.get("max", math.inf):
        raise ConfigError(f"{spec}: min is {values['min']:g}, above max, which is {values['max']:g}")
    if (most_output := values.get("output_max", 0)) and not 1 <= values["output"] <= most_output:
        raise ConfigError(
            f"{spec}: output_max is {most_output:g} and output is {values['output']:g}; outputs have from `output` to "
            f"`output_max` tokens, so give an output from 1 to {most_output:g}"
        )
    lengths = build(values)
    prefixes = _read_prefixes(spec, values, lengths.shortest_prompt)
    seed = int(values["seed"])
    return Workload(spec, int(values["n"]), lengths.longest, math.inf, lengths.draw, seed, _prefixes=prefixes)


def _read_prefixes(spec: str, values: Mapping[str, float], shortest_prompt: int) -> Callable[[], Iterator[_Prefix]]:
    """Return a function that yields the prefix of each request, by the parameters `shared` and `groups`."""
    shared, groups, seed = int(values["shared"]), int(values["groups"]), int(values["seed"])
    if shared == 0:
        if groups > 1:
            raise ConfigError(f"{spec}: groups is {groups}, and nothing is shared; give shared=TOKENS too")
        return _no_prefixes
    if shared >= shortest_prompt:
        raise ConfigError(
            f"{spec}: shared is {shared}, and the shortest prompt has {shortest_prompt} tokens; each prompt needs a "
            f"token of its own, so give a smaller `shared` or longer prompts"
        )
    return lambda: (_Prefix(f"{seed} {group}", shared) for group in _shuffle(int(values["n"]), groups, seed + 3))


def _shuffle(num_requests: int, groups: int, seed: int) -> Iterator[int]:
    """Yield the group of each request in random order. The sizes of groups differ by at most 1.

    This is the Fisher-Yates shuffle of all request numbers, from the last place to the first. Only the numbers that
    were moved are in memory.
    """
    rng = random.Random(seed)
    moved: dict[int, int] = {}
    for last in range(num_requests - 1, -1, -1):
        place = rng.randint(0, last)
        number, moved_last = moved.get(place, place), moved.pop(last, last)
        if place < last:
            moved[place] = moved_last
        yield number % groups


def _read(spec: str, pairs: list[str], kinds: Mapping[str, Callable[[str], float]]) -> dict[str, float]:
    values: dict[str, float] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if name not in kinds or not equals:
            raise ConfigError(f"{spec}: {pair!r} is not one of its parameters: {', '.join(kinds)}, each as name=value")
        if name in values:
            raise ConfigError(f"{spec}: {name} is given twice, {values[name]:g} and {text}; leave one of them out")
        try:
            values[name] = kinds[name](text)
        except ValueError:
            raise ConfigError(f"{spec}: {name} is {text!r}; it must be a number") from None
    missing = [name for name in kinds if name == "rate" and name not in values]
    if missing:
        raise ConfigError(f"{spec}: {missing[0]} is missing; write {missing[0]}=NUMBER, as in poisson:rate=7,fixed:n=9")
    return values


class _LengthRule(NamedTuple):
    """A rule that draws lengths.

    Attributes:
        longest: most tokens of a request, prompt and output together.
    """

    draw: Callable[[random.Random], Iterator[Lengths]]
    longest: int
    shortest_prompt: int


def _zipf(values: Mapping[str, float]) -> _LengthRule:
    low, high, theta, pd = int(values["min"]), int(values["max"]), values["theta"], values["pd"]
    weights = list(itertools.accumulate(k**-theta for k in range(1, high - low + 2)))

    def split(length: int) -> Lengths:
        output = max(1, round(length / (pd + 1)))
        return max(1, length - output), output

    def draw(rng: random.Random) -> Iterator[Lengths]:
        while True:
            yield split(low + min(bisect.bisect_left(weights, rng.random() * weights[-1]), high - low))

    return _LengthRule(draw, high + 1, split(low)[0])


def _uniform(values: Mapping[str, float]) -> _LengthRule:
    low, high, pd = int(values["min"]), int(values["max"]), values["pd"]
    output, most_output = int(values["output"]), int(values["output_max"])

    def draw(rng: random.Random) -> Iterator[Lengths]:
        while True:
            prompt = rng.randint(low, high)
            yield prompt, rng.randint(output, most_output) if most_output else output or max(1, int(prompt // pd))

    return _LengthRule(draw, high + (most_output or output or max(1, int(high // pd))), low)


def _fixed(values: Mapping[str, float]) -> _LengthRule:
    lengths = int(values["prompt"]), int(values["output"])
    return _LengthRule(lambda rng: itertools.repeat(lengths), sum(lengths), lengths[0])


def _joined(spec: str, parts: list[Workload]) -> Workload:
    for part in parts:
        if part.has_arrivals:
            rate = f"{part.rate:g}" if math.isfinite(part.rate) else "..."
            whole = f"poisson:rate={rate},then:..."
            raise ConfigError(f"{spec}: {part.spec} has arrivals of its own; put them before all parts: {whole}")

    def draw(rng: random.Random) -> Iterator[Lengths]:
        return itertools.chain.from_iterable(part.lengths() for part in parts)

    def prefixes() -> Iterator[_Prefix]:
        return itertools.chain.from_iterable(itertools.islice(part._prefixes(), part.num_requests) for part in parts)

    return Workload(
        spec,
        sum(part.num_requests for part in parts),
        max(part.max_tokens for part in parts),
        math.inf,
        draw,
        parts[0]._seed,
        _prefixes=prefixes if any(part.shares_prefixes for part in parts) else _no_prefixes,
    )


# Parameters that may be 0, by kind of workload. With output=0, pd gives the output. With output_max=0, `output` does.
_FROM_ZERO = {
    "zipf": ("theta", "seed", "shared"),
    "uniform": ("output", "output_max", "seed", "shared"),
    "fixed": ("seed", "shared"),
}
_NOTHING_SHARED = {"shared": 0, "groups": 1}
_KINDS: dict[str, tuple[dict[str, float], Callable[[Mapping[str, float]], _LengthRule]]] = {
    "zipf": ({"n": 10000, "min": 1024, "max": 4096, "theta": 0.4, "pd": 10, "seed": 0, **_NOTHING_SHARED}, _zipf),
    "uniform": (
        {"n": 32, "min": 256, "max": 1024, "pd": 8, "output": 0, "output_max": 0, "seed": 0, **_NOTHING_SHARED},
        _uniform,
    ),
    "fixed": ({"n": 100, "prompt": 1024, "output": 128, "seed": 0, **_NOTHING_SHARED}, _fixed),
}
