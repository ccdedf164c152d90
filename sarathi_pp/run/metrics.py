"""Prometheus metrics during a run, on loopback: `http://127.0.0.1:PORT/metrics`.

Every scrape reads the newest progress, so all its figures are of the same moment. Only this machine can scrape. To show
the metrics on another machine, run the Prometheus agent here or forward the port.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sarathi_pp.engine.progress import Progress
from sarathi_pp.errors import ConfigError

_ADDRESS = "127.0.0.1"


class MetricsServer:
    """An HTTP server that serves the newest progress as metrics until `close`.

    Any thread may call `update`, which never waits for a scrape. Before the first update, the server serves only the
    number of stages.

    Args:
        port: port on loopback. 0 picks a free one.
        num_stages: number of stages of the run.

    Attributes:
        port: the port that is in use.

    Raises:
        ConfigError: the port cannot be used.
    """

    def __init__(self, port: int, num_stages: int) -> None:
        self._figures = _Figures(num_stages)
        registry = CollectorRegistry()
        registry.register(self._figures)
        try:
            self._server, self._thread = start_http_server(port, _ADDRESS, registry)
        except OSError as error:
            raise _refused(port, error) from error
        self.port: int = self._server.server_port

    def update(self, snapshot: Progress) -> None:
        """Serve this progress from now on."""
        self._figures.snapshot = snapshot

    def close(self) -> None:
        """Stop serving and release the port. A second call does nothing."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def check_port(port: int) -> None:
    """Check that the port can be used. Call this before the run starts anything, so that nothing has to be undone.

    Raises:
        ConfigError: the port cannot be used.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_ADDRESS, port))
        except OSError as error:
            raise _refused(port, error) from error


def _refused(port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"--metrics-port {port}: cannot listen on {_ADDRESS}:{port}: {error.strerror}."
        f"\n  try  another port, or --metrics-port 0 for a free one"
    )


class _Figures(Collector):
    """The newest progress in the form that the Prometheus client reads at each scrape."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self.snapshot: Progress | None = None

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("pipeline_stages", "Stages of the pipeline.", value=self._num_stages)
        snapshot = self.snapshot
        if snapshot is not None:
            yield from _stage_metrics(snapshot)
            yield from _request_metrics(snapshot)
            yield from _work_metrics(snapshot, self._num_stages)


def _stage_metrics(snapshot: Progress) -> Iterator[Metric]:
    bubble = (
        "Share of the time from first issue to last result without compute. Too high while microbatches are in flight."
    )
    yield _by_stage(GaugeMetricFamily("pipeline_bubble_ratio", bubble, labels=["stage"]), snapshot.bubble_ratios)
    busy = "Share of the time since the last report in which the stage computed."
    yield _by_stage(GaugeMetricFamily("pipeline_stage_busy_ratio", busy, labels=["stage"]), snapshot.stage_busy)
    compute = "Time the stage has computed."
    counter = CounterMetricFamily("pipeline_stage_compute_seconds", compute, labels=["stage"])
    yield _by_stage(counter, snapshot.stage_compute_s)


def _by_stage(family: GaugeMetricFamily | CounterMetricFamily, values: Iterable[float]) -> Metric:
    for stage, value in enumerate(values):
        family.add_metric([str(stage)], value)
    return family


def _request_metrics(snapshot: Progress) -> Iterator[Metric]:
    ended = CounterMetricFamily("pipeline_requests", "Requests that ended, by outcome.", labels=["outcome"])
    ended.add_metric(["done"], snapshot.requests_done)
    ended.add_metric(["failed"], snapshot.requests_failed)
    yield ended
    yield GaugeMetricFamily("pipeline_requests_running", "Requests that hold KV pages.", value=snapshot.running)
    yield GaugeMetricFamily("pipeline_requests_waiting", "Requests read and not started.", value=snapshot.waiting)


def _work_metrics(snapshot: Progress, num_stages: int) -> Iterator[Metric]:
    """Yield the metrics of tokens, prefill chunks and KV pages. Those of chunks and pages are the same on each stage.

    A chunk counts after it has passed every stage. Each stage holds the same pages, for its own layers.
    """
    prompt, output = "Prompt tokens of finished requests.", "Output tokens of finished requests."
    yield CounterMetricFamily("pipeline_prompt_tokens", prompt, value=snapshot.prompt_tokens)
    yield CounterMetricFamily("pipeline_output_tokens", output, value=snapshot.output_tokens)
    queried = "Prompt tokens of requests that have started. 0 if the prefix cache is off."
    cached = "Prompt tokens that were found in the prefix cache when their request started."
    yield CounterMetricFamily("pipeline_prefix_queried_tokens", queried, value=snapshot.prefix_queried_tokens)
    yield CounterMetricFamily("pipeline_prefix_cached_tokens", cached, value=snapshot.prefix_cached_tokens)
    yield CounterMetricFamily("pipeline_prefill_chunks", "Prompt chunks completed.", value=snapshot.chunks_done)
    rate = "Prompt chunks completed per second, from first issue to last result."
    chunks = GaugeMetricFamily("chunk_throughput", rate, labels=["stage"])
    yield _by_stage(chunks, [snapshot.chunk_throughput] * num_stages)
    waste = "Share of the room in the held KV pages without a token. No sample while no page is held."
    held = num_stages if snapshot.kv_fragmentation is not None else 0
    empty = GaugeMetricFamily("kv_cache_fragmentation", waste, labels=["stage"])
    yield _by_stage(empty, [snapshot.kv_fragmentation or 0.0] * held)
