"""Policies from outside the package: a class by its module, a name by an entry point, and refusals."""

import contextlib
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_pp.core.policy import POLICIES, module_being_imported, parse_policy, parse_recorded, registry
from sarathi_pp.core.policy.orca import Orca
from sarathi_pp.core.policy.sarathi import Sarathi
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.errors import ConfigError, PolicyError, StoppedError
from tests.core.driving import run_golden
from tests.thinning import examples

MINE = """
from dataclasses import dataclass
from sarathi_pp.core.policy import Policy, parameter
from sarathi_pp.core.policy.sarathi import Sarathi

@dataclass(frozen=True)
class Mine(Sarathi):
    default_chunk_size = 64
    spare_microbatches = 2
    tbt_slo: float = parameter(0.0, least=0)
    label: str = "no parameter"

class Outer:
    class Inner(Sarathi):
        pass

class Half(Policy):
    def max_tokens(self, limits):
        return limits.chunk_size

class Needs(Sarathi):
    def __init__(self, patience):
        pass

class Duck:
    def pick(self, view):
        return []
    def max_tokens(self, limits):
        return 1

def function():
    pass

@dataclass(frozen=True, slots=True)
class Field(Sarathi):
    wants_cost: bool = True

class Word(Sarathi):
    default_chunk_size = "256"

class Empty(Sarathi):
    default_chunk_size = 0

class Fails(Sarathi):
    def __init__(self):
        raise OSError("no licence")

class Unbounded(Sarathi):
    def max_tokens(self, limits):
        return 1.5 * limits.chunk_size

class Lost(Sarathi):
    def max_tokens(self, limits):
        return limits.no_such_limit
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a folder on the import path, and remove every trace of it afterwards."""
    for name, text in {
        "mine": MINE,
        "broken": "import no_such_library",
        "unfinished": "def",
        "failing": "raise RuntimeError('no licence')",
        "script": "raise SystemExit(0)",
        "program": f"{MINE}\nfrom sarathi_pp import LLM\nLLM('any', policy='program_of_test:Mine')",
    }.items():
        (tmp_path / f"{name}_of_test.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    parse_policy.cache_clear()
    yield tmp_path
    parse_policy.cache_clear()
    for name in {*sys.modules} - before:
        if name.endswith("_of_test"):
            del sys.modules[name]


def install(folder: Path, distribution: str, **points: str) -> None:
    """Write the entry points of an installed distribution."""
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    lines = (f"{name} = {path}\n" for name, path in points.items())
    (info / "entry_points.txt").write_text("[sarathi_pp.policies]\n" + "".join(lines))


# One workload is enough here; the golden tests of each policy have others.
WORKLOAD = dict(stages=2, chunk_size=8, prompts=[20, 10, 3], outputs=[3, 2, 5])


@settings(max_examples=examples(60))
@given(
    name=st.sampled_from(sorted(POLICIES)),
    stages=st.integers(1, 4),
    chunk_size=st.sampled_from([1, 7, 16]),
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6)), min_size=1, max_size=6),
)
def test_a_policy_has_the_same_schedule_by_its_name_and_by_its_class(name, stages, chunk_size, requests):
    prompts, outputs = zip(*requests, strict=True)
    workload = dict(stages=stages, chunk_size=chunk_size, prompts=prompts, outputs=outputs)
    assert run_golden(POLICIES[name], **workload) == run_golden(name, **workload)


@pytest.mark.parametrize("given", ["even=1", "even=0"])
def test_parameters_follow_the_class(given):
    spec = parse_policy(f"sarathi_pp.core.policy.sarathi:Sarathi:{given}")
    assert spec.make() == Sarathi(even=int(given[-1])) and spec.name == "sarathi_pp.core.policy.sarathi:Sarathi"
    assert str(spec) == f"sarathi_pp.core.policy.sarathi:Sarathi:{given}"


def test_what_a_policy_says_that_it_needs_is_taken_from_its_class(folder):
    spec = parse_policy("mine_of_test:Mine")
    assert (spec.kind.default_chunk_size, spec.kind.uses_chunk_size, spec.inflight(3)) == (64, True, 5)
    assert (
        str(spec.with_tbt_slo(0.5)) == "mine_of_test:Mine:tbt_slo=0.5" and spec.with_tbt_slo(0.5).make().tbt_slo == 0.5
    )
    assert run_golden("mine_of_test:Mine", **WORKLOAD) == run_golden("sarathi", **WORKLOAD)
    assert isinstance(parse_policy("mine_of_test:Outer.Inner").make(), Sarathi)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mine_of_test:Mine:odd=1", "mine_of_test:Mine has no parameter 'odd'; it takes: even, tbt_slo"),
        ("mine_of_test:Mine:label=x", "no parameter 'label'"),
        ("mine_of_test:Other", "mine_of_test has no Other; its policies are: Empty, Fails, Field, Half, Lost, Mine, "),
        ("mine_of_test:Half", "mine_of_test:Half lacks pick; a policy defines pick and max_tokens"),
        ("mine_of_test:Needs", "missing a required argument: 'patience'; give each field of a policy a default"),
        ("mine_of_test:Duck", "is no policy; derive the class from sarathi_pp.core.policy.Policy"),
        ("mine_of_test:function", "is no policy; derive the class"),
        ("nowhere_of_test:Mine", "there is no module nowhere_of_test; install it, add its folder to PYTHONPATH"),
        ("mine_of_test.deeper:Mine", "there is no module mine_of_test.deeper"),
        ("broken_of_test:Mine", "importing broken_of_test failed with ModuleNotFoundError: .*no_such_library"),
        ("unfinished_of_test:Mine", "importing unfinished_of_test failed with SyntaxError"),
        ("failing_of_test:Mine", "failed with RuntimeError: no licence; see python -c 'import failing_of_test'"),
        ("script_of_test:Mine", "ends the program when it is imported; put what it runs below if __name__ == "),
        (
            "program_of_test:Mine",
            "ConfigError: program_of_test is imported for its policy, and starts an LLM. Put",
        ),
        ("mine_of_test:Field", r"Field.wants_cost is a field of a dataclass; .*: write wants_cost: ClassVar\[bool\]"),
        ("mine_of_test:Word", "Word.default_chunk_size is '256'; it must be of type int and at least 1"),
        ("mine_of_test:Empty", "Empty.default_chunk_size is 0; it must be of type int and at least 1"),
        ("./mine_of_test.py:Mine", "names no class; give package.module:Class, as Python imports it"),
        (":Mine", "names no class"),
        ("__main__:Mine", "the other processes of a run cannot import __main__"),
        ("mine_of_test", r"'mine_of_test' is not known; choose one of .*sarathi.*, or give a class .*module:Class"),
        ("mine_of_test:patience=3", "'mine_of_test' is not known"),
    ],
)
def test_what_is_no_policy_is_refused_with_the_remedy(text, says, folder):
    with pytest.raises(ConfigError, match=says) as refused:
        parse_policy(text)
    assert text.partition(":")[0] in str(refused.value)


def test_an_installed_policy_is_found_by_the_name_that_it_registers(folder):
    install(folder, "one", mine="mine_of_test:Mine", half="mine_of_test:Half")
    assert str(parse_policy("mine:even=1")) == "mine:even=1" and parse_policy("mine:even=1").make().even == 1
    assert run_golden("mine", **WORKLOAD) == run_golden("sarathi", **WORKLOAD)
    with pytest.raises(ConfigError, match="--policy half: mine_of_test:Half lacks pick"):
        parse_policy("half")
    with pytest.raises(ConfigError, match="'other' is not known; choose one of .*half, mine, orca"):
        parse_policy("other")


def test_a_name_of_two_distributions_is_refused_unless_both_mean_the_same(folder):
    install(folder, "one", mine="mine_of_test:Mine", same="mine_of_test:Mine")
    install(folder, "two", mine="mine_of_test:Half", same="mine_of_test:Mine")
    owners = "mine_of_test:Mine of one and mine_of_test:Half of two"
    says = f"several policies have this name: {owners}; give .* as module:Class"
    with pytest.raises(ConfigError, match=f"--policy mine: {says}"):
        parse_policy("mine")
    assert parse_policy("same").kind.__name__ == "Mine"


def test_entry_points_are_looked_up_for_no_other_name(folder, monkeypatch):
    """The lookup reads a file of every installed distribution.

    Also, no distribution replaces a policy of the package.
    """
    install(folder, "one", orca="mine_of_test:Mine")
    assert parse_policy("orca").kind is Orca
    monkeypatch.setattr(registry, "installed_policies", lambda: pytest.fail("looked up"))
    parse_policy.cache_clear()
    assert [parse_policy(name).name for name in POLICIES] == [*POLICIES]
    parse_policy("mine_of_test:Mine")


@pytest.mark.parametrize("text", ["mine_of_test:Mine", "mine", "mine_of_test:Mine:even=1"])
def test_nothing_is_imported_because_a_trace_names_it(text, folder):
    install(folder, "one", mine="mine_of_test:Mine")
    assert parse_recorded(text) is None and "mine_of_test" not in sys.modules


def test_what_one_thread_imports_is_no_matter_of_another(folder):
    (folder / "slow_of_test.py").write_text(f"import time, sys\nsys.started.set()\nsys.go_on.wait(10)\n{MINE}")
    sys.started, sys.go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=parse_policy, args=("slow_of_test:Mine",))
    thread.start()
    assert sys.started.wait(10) and module_being_imported() is None
    sys.go_on.set()
    thread.join()
    del sys.started, sys.go_on


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Fails", "--policy mine_of_test:Fails: making it failed with OSError: no licence"),
        ("Unbounded", "mine_of_test:Unbounded has a max_tokens of 384.0; it must be an integer of at least 1"),
        ("Lost", "mine_of_test:Lost failed in max_tokens with AttributeError: .* no attribute 'no_such_limit'"),
    ],
)
def test_what_sizes_the_buffers_of_a_run_is_checked_before_it(name, says, folder):
    with pytest.raises(PolicyError, match=says):
        parse_policy(f"mine_of_test:{name}").max_tokens(Limits(2, 256, 4, 256, 16, 64, 2))


def test_ranks_compare_the_source_of_a_policy(folder):
    """A name alone does not identify a file that each host stores separately."""
    first = parse_policy("mine_of_test:Mine").source
    assert first.startswith("mine_of_test:Mine in a file with SHA-256 ")
    (folder / "mine_of_test.py").write_text(f"{MINE}# edited\n")
    assert parse_policy("mine_of_test:Mine").source != first
    assert parse_policy("sarathi:even=1").source == "sarathi"


def test_the_current_directory_is_searched_for_what_is_nowhere_else(folder, monkeypatch):
    here = folder / "here"
    here.mkdir()
    (here / "local_of_test.py").write_text(MINE)
    monkeypatch.chdir(here)
    searched = [*sys.path]
    for text in ("mine_of_test:Mine", "nowhere_of_test:Mine", "broken_of_test:Mine"):
        with contextlib.suppress(ConfigError):
            parse_policy(text)
        assert sys.path == searched, text
    parse_policy("local_of_test:Mine")
    assert sys.path == [*searched, str(here)]
    sys.path.remove(str(here))


def test_a_signal_that_comes_while_a_policy_is_imported_is_no_fault_of_the_policy(tmp_path, monkeypatch):
    """The signal handler raises at any point of the program.

    A rank that is stopped there must not report a wrong option.
    """
    stopped = "from sarathi_pp.errors import StoppedError\nraise StoppedError.by(15, 'the run')\n"
    (tmp_path / "stopped_of_test.py").write_text(stopped)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StoppedError, match="the run was stopped by SIGTERM"):
        parse_policy("stopped_of_test:Mine")
