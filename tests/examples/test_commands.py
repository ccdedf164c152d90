"""Every command of the README files and of docs/ is run here, run by a test named here, or at least parsed.

Commands that take long are only parsed. A command that is in neither table is run here.
"""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from sarathi_pp.cli.main import cli
from tests.commands.processes import COMMAND, ROOT, TORCHRUN, console_script, environment, free_port
from tests.machine import patient

DOCS = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))
PAGES = ("README.md", "CONTRIBUTING.md", "examples/README.md", *DOCS)

TWO_NODES = "tests/launch/test_multinode.py::test_two_nodes_answer_a_file_and_end_with_the_code_of_the_run"
TWO_AGENTS = "tests/commands/test_processes.py::test_two_agents_with_run_directories_of_their_own_make_one_run"
EXAMPLE = "tests/examples/test_examples.py::test_it_runs_and_shows_what_it_says"
BENCH = "tests/commands/test_bench_command.py::test_people_are_told_each_run_and_the_table"
# The start of a command -> the test or script that runs it.
ELSEWHERE = {
    "bash launch/test.sh": ".ci/run::launch/test.sh",
    "export NNODES=": TWO_NODES,
    "NODE_RANK=": TWO_NODES,
    "NNODES=2 NODE_RANK=0": TWO_NODES,
    "torchrun --nnodes 2": TWO_AGENTS,
    "RUN=runs/first sbatch": "tests/launch/test_slurm.py::test_a_job_that_is_told_to_stop_is_queued_again_and_goes_on",
    "kubectl apply": "tests/launch/test_kubernetes.py::test_the_train_job_runs_as_two_pods",
    "python -m pip": "tests/packaging/test_install.py::test_the_wheel_brings_all_that_the_main_job_takes",
    'eval "$(_SARATHI_PP_COMPLETE': "tests/packaging/test_completion.py::test_bash_completes_by_the_script",
    "python -m tests.architecture.reference_pages": (
        "tests/architecture/test_readme.py::test_a_reference_page_is_what_the_code_makes"
    ),
    "source .venv/bin/activate": "launch/setup.sh::set_up",  # it makes the environment in which the tests run
    "sarathi-pp bench --model examples": BENCH,
    "python examples/library.py": EXAMPLE,
    "python examples/add_a_model.py": EXAMPLE,
}
# Commands that take minutes to hours, or need other engines, by their start. Click parses their options and types.
LONG = (
    "python examples/benchmarks/",
    "sarathi-pp bench --model /tmp/",
    "sarathi-pp bench --model examples",
    "sarathi-pp simulate --preset gpt3-a100-tp8pp8 --workload zipf:n=10000,",
)

pytestmark = pytest.mark.timeout(290)


def commands(page: str) -> list[str]:
    """Return each command line of a page's bash blocks, with continued lines joined."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    said = (re.sub(r"\s+", " ", re.split(r"(?:^|   )#", line)[0]).strip() for line in lines)
    return [line for line in said if line]


ALL = {page: commands(page) for page in PAGES}
LINES = [line for lines in ALL.values() for line in lines]
HERE = [line for line in LINES if not line.startswith((*ELSEWHERE, *LONG))]


def parse(line: str, scripts: Path) -> None:
    """Raise click's error for a command line; run nothing."""
    words = shlex.split(line)
    if words[0] == "python":
        script = ROOT / words[1]
        command, arguments = importlib.import_module(script.stem).main, words[2:]
        assert script.parent == scripts
    else:
        group, arguments = cli, words[1:]
        command = group.get_command(click.Context(group), arguments[0])
        arguments = arguments[1:]
    assert isinstance(command, click.Command), line
    command.make_context(words[0], arguments, resilient_parsing=False)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = ROOT / "examples" / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.mark.parametrize("line", [line for line in dict.fromkeys(LINES) if line.startswith(LONG)])
def test_what_takes_long_has_options_that_there_are(
    line: str, scripts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("examples", "docs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    for name in re.findall(r"/tmp/[\w/]+", line):
        (tmp_path / name[1:]).mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(tmp_path)
    parse(line.replace("/tmp/", "tmp/"), scripts)


@pytest.mark.parametrize("line", ["python examples/benchmarks/measure_300m.py --pd x", "sarathi-pp bench --polcy orca"])
def test_options_that_there_are_not_are_found(line: str, scripts: Path) -> None:
    with pytest.raises(click.ClickException):
        parse(line, scripts)


@pytest.mark.parametrize("start", ELSEWHERE)
def test_who_runs_the_others_is_there(start: str) -> None:
    file, _, name = ELSEWHERE[start].partition("::")
    assert name in (ROOT / file).read_text()
    assert any(line.startswith(start) for line in LINES), f"no command begins with {start!r}: take it out"


def test_every_page_has_commands_and_most_are_run() -> None:
    assert len(HERE) >= 15
    assert all(any(line.startswith(start) for line in LINES) for start in LONG)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make a folder with the files that the commands read, in which they also write."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("examples", "launch"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "examples" / "prompts.jsonl", folder)
    yield folder


def as_run(line: str, folder: Path) -> str:
    """Return the command with a reader's values, sizes that tests can afford, and a free port."""
    line = line.replace("$MODEL", "examples/tiny-adder").replace("$HEAD", "127.0.0.1")
    line = line.replace("--metrics-port 9400", "--metrics-port 0")
    if line.startswith("bash launch/quickstart.sh"):
        return f"bash {shlex.quote(str(ROOT))}/launch/quickstart.sh --kv-cache-memory 16MiB"
    if (" generate " in line or "launch/local.sh" in line) and "--help" not in line:
        output = re.search(r"--output (\S+)", line)
        assert output, line
        line += " --kv-cache-memory 16MiB --device cpu --quiet"
        if (folder / output[1]).exists() and "--resume" not in line:
            line += " --overwrite"
    return re.sub(r"^torchrun ", f"torchrun --master-addr 127.0.0.1 --master-port {free_port()} ", line)


def words_of(line: str, folder: Path) -> tuple[str, ...]:
    """Return the words that bash would start, or bash itself for a complex line.

    Without bash it starts warm (tests/warm).
    """
    line = line.replace('"$(which sarathi-pp)"', shlex.quote(str(console_script(folder))))
    programs = {"sarathi-pp": COMMAND, "torchrun": (str(TORCHRUN),)}
    first, *others = shlex.split(line)
    if first not in programs or re.search(r"[$`|&;<>*?(){}~#]", line):
        return ("bash", "-c", line)
    return (*programs[first], *others)


@pytest.mark.parametrize("line", dict.fromkeys(HERE))
def test_the_others_run(line: str, checkout: Path) -> None:
    """They run in the order of the pages, because some read the output of earlier ones."""
    variables = environment()
    variables |= {"PATH": f"{Path(sys.executable).parent}:{variables['PATH']}", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        words_of(as_run(line, checkout), checkout),
        cwd=checkout,
        env=variables,
        capture_output=True,
        text=True,
        timeout=patient(200),
        check=False,
    )
    if made := re.search(r"answers in (.*/runs/quickstart-\w+)/", run.stdout):
        shutil.rmtree(made[1], ignore_errors=True)
    assert run.returncode == 0, run.stdout + run.stderr
