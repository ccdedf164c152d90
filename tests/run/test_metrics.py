"""The metrics as a Prometheus server would see them."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sarathi_pp.engine.progress import Progress
from sarathi_pp.errors import ConfigError
from sarathi_pp.run.metrics import MetricsServer
from tests.machine import patient

SNAPSHOT = Progress(
    elapsed_s=12.0,
    requests_done=3,
    requests_failed=1,
    running=8,
    waiting=5,
    prompt_tokens=900,
    output_tokens=100,
    tokens_computed=1000,
    chunks_done=40,
    stage_busy=(0.75, 0.5),
    stage_compute_s=(8.0, 4.0),
    window_s=10.0,
    kv_fragmentation=0.25,
    prefix_queried_tokens=950,
    prefix_cached_tokens=320,
)


def scrape(port: int):
    """Return the metric families by name."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=patient(10)) as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=")
        return {family.name: family for family in text_string_to_metric_families(response.read().decode())}


def values(families) -> dict[tuple[str, ...], float]:
    """Return every sample, by its name and label values."""
    return {(s.name, *s.labels.values()): s.value for family in families.values() for s in family.samples}


@pytest.fixture
def server():
    server = MetricsServer(0, num_stages=2)
    yield server
    server.close()


def test_every_figure_of_a_snapshot_is_served(server: MetricsServer) -> None:
    server.update(SNAPSHOT)
    assert values(scrape(server.port)) == pytest.approx(
        {
            ("pipeline_stages",): 2,
            ("pipeline_bubble_ratio", "0"): 0.2,
            ("pipeline_bubble_ratio", "1"): 0.6,
            ("pipeline_stage_busy_ratio", "0"): 0.75,
            ("pipeline_stage_busy_ratio", "1"): 0.5,
            ("pipeline_stage_compute_seconds_total", "0"): 8.0,
            ("pipeline_stage_compute_seconds_total", "1"): 4.0,
            ("pipeline_requests_total", "done"): 3,
            ("pipeline_requests_total", "failed"): 1,
            ("pipeline_requests_running",): 8,
            ("pipeline_requests_waiting",): 5,
            ("pipeline_prompt_tokens_total",): 900,
            ("pipeline_output_tokens_total",): 100,
            ("pipeline_prefix_queried_tokens_total",): 950,
            ("pipeline_prefix_cached_tokens_total",): 320,
            ("pipeline_prefill_chunks_total",): 40,
            ("chunk_throughput", "0"): 4.0,
            ("chunk_throughput", "1"): 4.0,
            ("kv_cache_fragmentation", "0"): 0.25,
            ("kv_cache_fragmentation", "1"): 0.25,
        }
    )


def test_every_family_has_a_help_text_and_the_type_that_its_name_promises(server: MetricsServer) -> None:
    server.update(SNAPSHOT)
    for name, family in scrape(server.port).items():
        assert family.documentation.endswith("."), name
        totals = all(sample.name.endswith("_total") for sample in family.samples)
        assert family.type == ("counter" if totals else "gauge"), name
    assert list(scrape(server.port)["pipeline_bubble_ratio"].samples[1].labels.items()) == [("stage", "1")]


def test_a_scrape_shows_the_newest_snapshot(server: MetricsServer) -> None:
    assert values(scrape(server.port)) == {("pipeline_stages",): 2}
    server.update(SNAPSHOT)
    server.update(replace(SNAPSHOT, requests_done=4, kv_fragmentation=None, window_s=0.0))
    found = values(scrape(server.port))
    assert found["pipeline_requests_total", "done"] == 4
    assert found["chunk_throughput", "0"] == 0.0
    assert not any(name in ("kv_cache_fragmentation", "pipeline_bubble_ratio") for name, *_ in found)


def test_only_loopback_is_served(server: MetricsServer) -> None:
    with socket.socket() as other, pytest.raises(ConnectionRefusedError):
        other.settimeout(10)
        other.connect(("127.0.0.2", server.port))


def test_close_ends_the_thread_and_gives_the_port_back() -> None:
    threads = set(threading.enumerate())
    server = MetricsServer(0, num_stages=1)
    assert set(threading.enumerate()) - threads
    server.close()
    server.close()
    assert set(threading.enumerate()) <= threads
    with pytest.raises(URLError, match="refused"):
        scrape(server.port)
    again = MetricsServer(server.port, num_stages=1)
    assert again.port == server.port
    again.close()


def test_a_taken_port_is_refused_with_its_number_and_a_way_out(server: MetricsServer) -> None:
    with pytest.raises(ConfigError, match=f"--metrics-port {server.port}: .* in use.*\n  try  another port"):
        MetricsServer(server.port, num_stages=2)
