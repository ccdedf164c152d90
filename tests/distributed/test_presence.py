"""Progress of a rank, as the other ranks see it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sarathi_pp.distributed import presence
from sarathi_pp.distributed.presence import Presence
from sarathi_pp.errors import PeerLostError
from sarathi_pp.trace.clock import ManualClock
from tests.commands.processes import environment
from tests.machine import patient

NAMES = ["stage 0", "stage 1"]


class Beats(dict):
    """A store of heartbeats."""

    def check(self, keys):
        return all(key in self for key in keys)

    def get(self, key):
        return self[key].encode()

    def set(self, key, value):
        self[key] = value


@pytest.fixture
def seen():
    store, clock = Beats(), ManualClock()
    watcher = Presence(store, 0, NAMES, 300.0, clock)
    yield store, clock, watcher
    watcher.close()


def test_whoever_beats_and_works_is_waited_for_however_long_it_takes(seen):
    store, clock, watcher = seen
    for beat in range(100):
        store.set("alive/1", f"{beat}\n{beat} 0\nloading")
        watcher.check([1])
        clock.sleep(299.0)


@pytest.mark.parametrize(
    ("beat", "work", "says"),
    [(0, 1, "has been silent for more than 300 s"), (1, 0, "neither computed nor read anything")],
)
def test_whoever_is_silent_or_does_nothing_is_named_with_its_phase(beat, work, says, seen):
    store, clock, watcher = seen
    with pytest.raises(PeerLostError, match=f"stage 1 .*{says}.*loading"):
        for number in range(10):
            store.set("alive/1", f"{beat * number}\n{work * number} 0\nloading")
            watcher.check([1])
            clock.sleep(50.0)


def test_what_was_seen_before_a_wait_says_nothing_about_it(seen):
    store, clock, watcher = seen
    store.set("alive/1", "1\n1 0\nloading")
    watcher.check([1])
    clock.sleep(1000.0)
    watcher.forget()
    watcher.check([1])


# Run alone in a process, because the threads of pytest and of its workers have their own work.
WAITS_THEN_WORKS = '''
import subprocess, sys, threading, time
from pathlib import Path
from torch.distributed import TCPStore
from sarathi_pp.distributed import presence
from sarathi_pp.wire.group import Group

def done():
    """As a thread of its own sees it."""
    found = []
    thread = threading.Thread(target=lambda: found.append(presence._done()))
    thread.start()
    thread.join()
    return found[0]

folder = Path(sys.argv[1])
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
group = Group(store, 0, 1, 10.0)
asks = f"""
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", {store.port}, wait_for_workers=False)
print("asking", flush=True)
while True:
    store.set("alive", "1")
"""
asking = subprocess.Popen([sys.executable, "-c", asks], stdout=subprocess.PIPE)
assert asking.stdout.readline() == b"asking\\n"
before_s, before_bytes = done()
time.sleep(3.0)
seconds, num_read = done()
assert asking.poll() is None
asking.kill()
assert seconds - before_s <= 0.03 and num_read == before_bytes, (seconds - before_s, num_read - before_bytes)
end_s = time.monotonic() + 60
while done()[0] - before_s < 0.1:
    assert time.monotonic() < end_s, "work is seen"
    sum(range(100_000))
(folder / "weights").write_bytes(bytes(1 << 20))
(folder / "weights").read_bytes()
assert done()[1] - before_bytes >= 1 << 20
group.close()
'''


def test_a_process_that_only_waits_does_no_work(tmp_path):
    """Gloo's threads wake up a hundred times per second, and answers of a store and checks cost time too."""
    command = [sys.executable, "-c", WAITS_THEN_WORKS, str(tmp_path)]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=patient(100))
    assert ended.returncode == 0, ended.stderr


def test_without_proc_a_beat_is_work(monkeypatch):
    monkeypatch.setattr(presence.Path, "is_dir", lambda self: False)
    assert presence._work(1) != presence._work(2)
