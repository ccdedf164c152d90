"""Run the contest of `sarathi-pp bench`, from its options to one document.

The document also has the floor: the least time in which this machine can do the work.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from sarathi_pp.bench.contest import Entrant, OurRun, PeerRun, Run, Work, hold
from sarathi_pp.bench.contest_report import contest_document
from sarathi_pp.bench.floor import Floor, shared_tokens
from sarathi_pp.bench.machine import MachineRates, measure_rates, wait_until_quiet
from sarathi_pp.bench.peers import parse_peer
from sarathi_pp.bench.workload_file import read_workload
from sarathi_pp.checkpoint.facts.support import ModelFacts, check_model
from sarathi_pp.checkpoint.fetch import find_model
from sarathi_pp.core.cost.estimate import DeviceSpeed
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.core.request import Request
from sarathi_pp.errors import ConfigError
from sarathi_pp.model.dtypes import Dtypes, choose_dtypes
from sarathi_pp.process.activity import Activity
from sarathi_pp.run.auto_options import estimated_cost

Document = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The options of `bench`, under their own names."""

    model: str
    workload: str
    policies: tuple[str, ...]
    stages: tuple[int, ...]
    chunk_sizes: tuple[int | None, ...]
    peers: tuple[str, ...]
    peers_dir: Path
    rounds: int
    max_num_seqs: int
    prefix_caches: tuple[str, ...]
    dtype: str
    profile: Path | None
    layer_split: tuple[int, ...] | Literal["even"] | None
    kv_cache_memory: int | None


def compete(setting: Setting, activity: Activity) -> Iterator[tuple[Run, Document]]:
    """Run the contest. When a run is over, yield it, and the document of all runs so far.

    Args:
        activity: shows the current run and the number of all runs to the user.

    Raises:
        ConfigError, MissingError: an option is wrong, or a model or an engine is missing. Raised before the first run.
        SarathiError: an entrant failed. See `hold`.
    """
    workload = read_workload(setting.workload)
    if workload.has_arrivals:
        raise ConfigError(
            f"--workload {setting.workload}: in bench all requests arrive at 0; leave out poisson: and arrival_s"
        )
    directory = find_model(setting.model)
    facts = check_model(directory)
    dtypes = choose_dtypes(setting.dtype, facts.dtype, "cpu", quantised=facts.quantised is not None)
    entrants = list(_entrants(setting))
    labels = [entrant.label for entrant in entrants]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"{label} is given {labels.count(label)} times; give it once")
    with activity.phase("waiting until the machine is quiet"):
        wait_until_quiet()
    with activity.phase("measuring the machine's rates"):
        rates = measure_rates(dtypes.weights)
    requests = list(workload.requests(vocabulary=facts.vocab_size))
    floor = _floor(directory, facts, requests, rates, dtypes.weights)
    told = {
        "model": setting.model,
        "workload": workload.spec,
        "dtype": dtypes.compute,
        "weights": dtypes.weights,
        "max_num_seqs": setting.max_num_seqs,
        "machine": asdict(rates),
        "floor": asdict(floor),
        "rounds": setting.rounds,
    }
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="sarathi-pp-bench-") as scratch:
        work = Work(directory, dtypes.weights, requests, setting.max_num_seqs, Path(scratch))
        for run in hold(work, entrants, setting.rounds, activity):
            runs.append(run)
            first = runs[0].token_ids
            yield run, contest_document([one.to_json(first) for one in runs], floor.seconds, **told)


def _entrants(setting: Setting) -> Iterator[Entrant]:
    """Yield the entrants: first sarathi-pp with each combination of options, then the other engines (peers).

    Raises:
        ConfigError, MissingError: another engine is not known, or is not installed.
    """
    given: list[str] = ["--dtype", setting.dtype]
    if setting.profile is not None:
        given += ["--profile", str(setting.profile)]
    if setting.layer_split is not None:
        split = setting.layer_split
        given += ["--layer-split", split if isinstance(split, str) else ",".join(map(str, split))]
    if setting.kv_cache_memory is not None:
        given += ["--kv-cache-memory", str(setting.kv_cache_memory)]
    policies = [parse_policy(text) for text in setting.policies]
    for stages, policy, mode in product(setting.stages, policies, setting.prefix_caches):
        for size in (setting.chunk_sizes or (None,)) if policy.kind.uses_chunk_size else (None,):
            sized = ["--chunk-size", str(size)] if size is not None else []
            label = f"{policy}{f' {size}' if size else ''}, {stages} stage{'s' * (stages > 1)}"
            if mode != "auto":
                label += f", prefix cache {mode}"
            schedule = ["--stages", str(stages), "--policy", str(policy), "--prefix-cache", mode]
            yield OurRun(label, (*schedule, *sized, *given))
    for text in setting.peers:
        choice = parse_peer(text)
        choice.python(setting.peers_dir)
        yield PeerRun(choice, setting.peers_dir)


def _floor(directory: Path, facts: ModelFacts, requests: Sequence[Request], rates: MachineRates, weights: str) -> Floor:
    """Return the floor at the best rates. Keys and values count as if they had the type of the weights."""
    speed = DeviceSpeed(dict.fromkeys((2, 4), rates.flops), rates.bytes_per_s, tile=1, layer_s=0.0, attention_share=1.0)
    whole, dtypes = [(0, facts.num_layers)], Dtypes(weights, weights)
    cost = estimated_cost(directory, facts, whole, dtypes=dtypes, device="cpu", page_size=1, speed=speed)
    prompts = [request.prompt_token_ids for request in requests]
    lengths = [(len(request.prompt_token_ids), request.sampling.max_new_tokens) for request in requests]
    return Floor.of(cost, lengths, shared_tokens(prompts))
