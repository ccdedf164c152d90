"""A killed batch resumes at its last row: in the end every row has the answer of an undisturbed run."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests import thinning
from tests.commands.processes import COMMAND, Files, console_script, environment, torchrun
from tests.faults.jobs import Answers, answers, num_lines, started
from tests.machine import patient

pytestmark = pytest.mark.timeout(300)

NUM_ROWS = 600
# Sampled: the draws of a row must not depend on the start in which it runs or on its batch mates.
OPTIONS = ("--max-new-tokens", "24", "--ignore-eos", "--temperature", "0.8", "--dtype", "float32", "--chunk-size", "32")


def files_of(folder: Path, num_rows: int = NUM_ROWS) -> Files:
    folder.mkdir(exist_ok=True)
    files = Files(folder)
    files.write_prompts([tuple(range(3, 4 + row % 40)) for row in range(num_rows)])
    return files


@pytest.fixture(scope="module")
def undisturbed(emulated: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return run_to_its_end(emulated, tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="module")
def answers_of_the_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Return the answers without the prefix cache. The prompts begin equally, so later runs share their pages."""
    return run_to_its_end(model, tmp_path_factory.mktemp("model"), "--prefix-cache", "off")


def run_to_its_end(model: Path, folder: Path, *options: str) -> Answers:
    files = files_of(folder)
    with started(files, model, *OPTIONS, *options) as run:
        assert run.end() == "" and run.process.returncode == 0
    found = answers(files)
    assert len(found) == NUM_ROWS
    return found


@pytest.mark.parametrize("stages", [pytest.param("1", marks=pytest.mark.full), "2"])
def test_a_job_that_is_killed_as_a_whole_goes_on(stages, model, answers_of_the_model, tmp_path):
    files = files_of(tmp_path)
    moments = random.Random(f"moments {stages}")
    lines = 0
    for _ in range(3 if thinning.full else 2):
        lines += moments.randrange(1, 120)
        with started(files, model, *OPTIONS, "--stages", stages, "--resume") as run:
            run.wait_for_lines(lines)
            run.kill_all()
        # As if it had been killed in the middle of a write, at some byte.
        data = files.output.read_bytes()
        files.output.write_bytes(data[: len(data) - moments.randrange(200)])
        lines = num_lines(files.output)
    with started(files, model, *OPTIONS, "--stages", "2" if stages == "1" else "1", "--resume") as run:
        said = run.end()
        assert run.process.returncode == 0, said
    assert answers(files) == answers_of_the_model
    report = files.report()
    assert (report["resumed"], report["requests"]) == ({"rows": lines, "failed": 0}, NUM_ROWS - lines)
    assert report["prefix_cache"]["mode"] == "all" and report["prefix_cache"]["hit_rate"] > 0.3


@pytest.mark.timeout(900)
@pytest.mark.full
def test_a_job_that_is_killed_as_a_whole_at_random_moments_goes_on(model, tmp_path):
    """The kill may come even before the job has joined, loaded or written anything."""
    kills = 20
    num_rows, options = 100 * kills, (*OPTIONS, "--stages", "2")
    calm, files = files_of(tmp_path / "calm", num_rows), files_of(tmp_path / "killed", num_rows)
    with started(calm, model, *options) as run:
        assert run.end() == "" and run.process.returncode == 0
    moments = random.Random("the whole job")
    for _ in range(kills):
        with started(files, model, *options, "--resume", "--request-rate", "30") as run:
            time.sleep(moments.uniform(0.5, 7.0))
            assert run.process.poll() is None, run.end()
            run.kill_all()
    with started(files, model, *options, "--resume") as run:
        said = run.end()
        assert run.process.returncode == 0, said
    assert answers(files) == answers(calm)


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1)), 2])
def test_a_stage_that_is_killed_is_started_again(stage, emulated, undisturbed, tmp_path):
    files = files_of(tmp_path)
    with started(files, emulated, *OPTIONS, "--stages", "3", "--max-restarts", "1") as run:
        run.wait_for_lines(40)
        run.stage(stage).kill()
        said = run.end()
        assert run.process.returncode == 0, said
    assert f"stage {stage} (rank {stage}) was killed by SIGKILL" in said
    assert "a stage was lost: restart 1 of 1" in said
    assert answers(files) == undisturbed
    assert files.exit_code() == 0
    assert sorted(path.name for path in files.run.glob("attempt-*")) == ["attempt-0000", "attempt-0001"]
    assert files.report()["resumed"]["rows"] >= 40


@pytest.mark.timeout(900)
def test_stages_that_are_killed_at_random_moments_again_and_again(model, tmp_path):
    kills = 20 if thinning.full else 1
    # A stage lives for at most 7 s and rows arrive at a rate, so no machine answers all of them in between.
    num_rows, rate = 210 * kills, ("--request-rate", "30")
    calm = files_of(tmp_path / "calm", num_rows)
    with started(calm, model, *OPTIONS) as run:
        assert run.end() == "" and run.process.returncode == 0
    files = files_of(tmp_path / "killed", num_rows)
    moments = random.Random("again and again")
    killed = 0
    with started(files, model, *OPTIONS, *rate, "--stages", "2", "--max-restarts", str(kills)) as run:
        while killed < kills:
            victim = run.stage(moments.randrange(2))
            try:
                # The time of a kill ranges from the start of a stage over its set-up into its work. The launcher ends
                # stages of an earlier start.
                victim.wait(moments.uniform(0.5, 7.0))
            except psutil.TimeoutExpired:
                victim.kill()
                victim.wait(patient(30))
                killed += 1
            assert run.process.poll() is None, f"it ended after {killed} kills"
        said = run.end(250)
        assert run.process.returncode == 0, said
    assert answers(files) == answers(calm)
    # The kill may hit a stage that its launcher is about to end, because the other stage was killed.
    assert said.count("a stage was lost: restart") >= kills * 3 // 4


@pytest.mark.full
def test_in_bfloat16_it_goes_on_with_the_same_rows(model, tmp_path):
    """The grouping into microbatches changes last bits, and so some samples, but the same rows are answered."""
    options = (*OPTIONS, "--dtype", "bfloat16")
    calm, files = files_of(tmp_path / "calm"), files_of(tmp_path / "killed")
    with started(calm, model, *options) as run:
        assert run.end() == "" and run.process.returncode == 0
    with started(files, model, *options, "--stages", "2") as run:
        run.wait_for_lines(100)
        run.kill_all()
    with started(files, model, *options, "--stages", "2", "--resume") as run:
        assert run.end() == "" and run.process.returncode == 0
    expected, found = answers(calm), answers(files)
    assert found.keys() == expected.keys()
    assert all(len(tokens) == 24 for tokens, _ in found.values())
    # The first token follows from the prompt alone.
    equal_starts = sum(found[row][0][0] == expected[row][0][0] for row in expected)
    equal = sum(found[row] == expected[row] for row in expected)
    print(f"equal rows: {equal / NUM_ROWS:.3f}, equal first tokens: {equal_starts / NUM_ROWS:.3f}")
    assert equal_starts > 0.9 * NUM_ROWS


def test_a_lost_stage_without_a_restart_is_75_and_can_be_resumed(emulated, undisturbed, tmp_path):
    files = files_of(tmp_path)
    with started(files, emulated, *OPTIONS, "--stages", "2") as run:
        run.wait_for_lines(20)
        run.stage(1).kill()
        run.end()
        assert (run.process.returncode, files.exit_code()) == (75, 75)
    with started(files, emulated, *OPTIONS, "--stages", "2", "--resume") as run:
        assert run.end() == "" and run.process.returncode == 0
    assert (answers(files), files.exit_code()) == (undisturbed, 0)


@pytest.mark.parametrize("earlier", [pytest.param(None, marks=pytest.mark.full), "--overwrite"])
def test_under_torchrun_a_restarted_job_goes_on_by_itself(earlier, emulated, undisturbed, ended, tmp_path):
    """A job with --overwrite also keeps the part of the output that it has written itself."""
    files = files_of(tmp_path)
    options = OPTIONS
    if earlier:
        shutil.copy(ended.output, files.output)
        shutil.copytree(ended.run, files.run)
        options = (*OPTIONS, earlier)
    front = restarting_torchrun(tmp_path)
    with started(files, emulated, *options, front=front) as run:
        run.wait_for_lines(40)
        run.stage(1).kill()
        said = run.end()
        assert run.process.returncode == 0, said
    assert answers(files) == undisturbed
    assert (files.exit_code(), files.report()["resumed"]["rows"] >= 40) == (0, True)


def restarting_torchrun(folder: Path) -> tuple[str, ...]:
    front = torchrun(2, console_script(folder))
    return (*front[:1], "--max-restarts", "1", *front[1:])


def test_under_torchrun_only_a_lost_stage_is_worth_a_restart(emulated, tmp_path):
    """torchrun restarts every run that does not end with 0; a finished run with a bad row keeps its report and code."""
    files = Files(tmp_path)
    files.write_prompts([(5, 6), (), (8, 9, 10)])
    with started(files, emulated, "--max-new-tokens", "4", front=restarting_torchrun(tmp_path)) as run:
        run.end()
        assert run.process.returncode == 1
    assert (files.exit_code(), files.report()["requests"], num_lines(files.output)) == (3, 3, 3)
    assert [path.name for path in files.run.glob("attempt-*")] == ["attempt-0000"]


def generate(files: Files, emulated: Path, *options: str) -> tuple[int, str]:
    done = subprocess.run(
        (*COMMAND, *files.options(emulated, "--quiet", *options)),
        cwd=files.folder, env=environment(), capture_output=True, text=True, timeout=patient(100),
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def ended(emulated, tmp_path_factory):
    """Make a small run that has ended."""
    files = Files(tmp_path_factory.mktemp("ended"))
    files.write_prompts([(5, 6), (7,), (8, 9, 10)])
    assert generate(files, emulated, "--max-new-tokens", "4") == (0, "")
    return files


@pytest.fixture
def finished(ended, tmp_path):
    """Return a copy of the ended run for each test to resume."""
    return Files(shutil.copytree(ended.folder, tmp_path / "copy"))


@pytest.mark.parametrize("stages", [pytest.param("1", marks=pytest.mark.full), "2"])
def test_another_question_is_refused_with_what_is_different(stages, finished, emulated):
    before = finished.output.read_bytes()
    code, said = generate(finished, emulated, "--resume", "--max-new-tokens", "5", "--seed", "1", "--stages", stages)
    assert code == 2
    assert "was written by a different run: seed was 0 and is 1; max_new_tokens was 4 and is 5; name another" in said
    assert finished.output.read_bytes() == before
    finished.write_prompts([(5, 6)])
    assert (
        "different run: the input file was changed; name"
        in generate(finished, emulated, "--resume", "--max-new-tokens", "4")[1]
    )
    assert finished.output.read_bytes() == before


@pytest.mark.parametrize("stages", [pytest.param("1", marks=pytest.mark.full), "2"])
def test_what_is_done_is_not_done_again(stages, finished, emulated):
    """No attempt is made."""
    before, report = finished.output.read_bytes(), finished.report()
    again = ("--resume", "--max-new-tokens", "4", "--stages", stages)
    assert generate(finished, emulated, *again) == (0, "")
    done = subprocess.run(
        (*COMMAND, *finished.options(emulated, *again, "--json")),
        cwd=finished.folder, env=environment(), capture_output=True, text=True, timeout=patient(100),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "all 3 rows have a line; nothing to do\n")
    assert json.loads(done.stdout)["resumed"] == {"rows": 3, "failed": 0}
    assert (finished.output.read_bytes(), finished.report(), finished.exit_code()) == (before, report, 0)
    assert [path.name for path in finished.run.glob("attempt-*")] == ["attempt-0000"]


def test_lines_that_were_appended_to_the_input_are_answered(finished, emulated):
    before = finished.output.read_bytes()
    with finished.input.open("a") as file:
        file.write('{"prompt_token_ids": [11]}\n')
    assert generate(finished, emulated, "--resume", "--max-new-tokens", "4") == (0, "")
    assert finished.output.read_bytes().startswith(before) and num_lines(finished.output) == 4
    assert finished.report()["resumed"]["rows"] == 3
    assert generate(finished, emulated, "--resume", "--max-new-tokens", "4") == (0, "")
    assert finished.report()["resumed"]["rows"] == 3


def test_force_goes_on_with_other_parameters(finished, emulated):
    with finished.input.open("a") as file:
        file.write('{"prompt_token_ids": [11]}\n')
    assert generate(finished, emulated, "--resume", "--force", "--max-new-tokens", "2") == (0, "")
    assert [len(tokens) for tokens in finished.tokens()] == [4, 4, 4, 2]


def test_a_run_directory_belongs_to_one_output(emulated, tmp_path):
    """It reports the answers of that output only, not of another output that was written meanwhile."""
    files = {name: Files(tmp_path / name) for name in ("one", "two")}
    for number, its in enumerate(files.values()):
        its.folder.mkdir()
        its.write_prompts([(5 + number,)])
    shared = ("--run-dir", str(tmp_path / "shared"), "--max-new-tokens", "4", "--ignore-eos")
    assert generate(files["one"], emulated, *shared) == (0, "")
    code, said = generate(files["two"], emulated, *shared, "--resume")
    assert code == 2 and "shared belongs to ../one/out.jsonl, not to ../two/out.jsonl" in said
    assert generate(files["two"], emulated, *shared, "--resume", "--force") == (0, "")
    first = files["one"].output.read_text()
    shutil.copy(files["two"].input, files["one"].input)
    code, said = generate(files["one"], emulated, *shared, "--resume")
    assert code == 2 and "output was ../two/out.jsonl and is ../one/out.jsonl" in said
    assert files["one"].output.read_text() == first
    assert generate(files["two"], emulated, *shared, "--resume") == (0, "")


def test_an_output_that_was_moved_with_its_run_directory_is_gone_on_with(finished, emulated, tmp_path):
    elsewhere = Files(tmp_path / "elsewhere")
    shutil.copytree(finished.folder, elsewhere.folder)
    renamed = elsewhere.folder / "answers.jsonl"
    elsewhere.output.rename(renamed)
    elsewhere.run.rename(f"{renamed}.run")
    again = ("--output", str(renamed), "--resume", "--max-new-tokens", "4")
    assert generate(elsewhere, emulated, *again) == (0, "")


def test_without_a_run_json_nobody_knows_what_the_output_answers(finished, emulated):
    (finished.run / "run.json").unlink()
    code, said = generate(finished, emulated, "--resume", "--max-new-tokens", "4")
    assert code == 2 and "run.json does not record what" in said


def test_errors_count_until_they_are_run_again(model, tmp_path):
    files = Files(tmp_path)
    files.input.write_text(
        '{"id": "good", "prompt_token_ids": [5]}\n{"id": "long", "prompt_token_ids": [6, 7, 8, 9]}\n'
    )
    short = ("--max-new-tokens", "2", "--kv-cache-memory")
    assert generate(files, model, "--max-model-len", "3", *short, "16MiB")[0] == 3
    again = ("--resume", "--force", *short, "16MiB")
    assert generate(files, model, *again)[0] == 3
    assert {json.loads(line)["id"] for line in files.output.read_text().splitlines()} == {"good", "long"}
    assert generate(files, model, "--retry-errors", *again) == (0, "")
    assert set(answers(files)) == {"good", "long"}


def test_a_stream_cannot_be_resumed(model, tmp_path):
    files = Files(tmp_path)
    command = (*COMMAND, "generate", "--model", str(model), "--input", "-", "--output", str(files.output), "--resume")
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), input="", capture_output=True, text=True, timeout=patient(60)
    )
    assert done.returncode == 2 and "needs an --input that can be read again" in done.stderr
    assert not files.output.exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--resume", "--overwrite"), "give only one of them"),
        (("--retry-errors",), "give --resume too"),
        (("--force",), "give --resume too"),
    ],
)
def test_options_that_say_nothing_are_refused(options, says, finished, emulated):
    code, said = generate(finished, emulated, *options)
    assert code == 2 and says in said


@pytest.mark.parametrize("stages", [pytest.param("1", marks=pytest.mark.full), "2"])
def test_strict_refuses_a_file_with_a_bad_line_before_anything_runs(stages, emulated, tmp_path):
    files = Files(tmp_path)
    files.input.write_text('{"id": 1, "prompt_token_ids": [5]}\n{nonsense\n{"id": 1, "prompt_token_ids": [6]}\n')
    code, said = generate(files, emulated, "--strict", "--stages", stages)
    assert code == 65
    assert "2 of 3 lines cannot run: line 2: " in said and "line 3: id 1 is already the id of line 1" in said
    assert not files.output.exists() and not files.run.exists()
    code, said = generate(files, emulated, "--stages", stages, "--max-new-tokens", "1")
    assert code == 3 and said.count("2 of 3 lines cannot run") == 1
    assert len(files.output.read_text().splitlines()) == 3


@pytest.mark.parametrize("wrong", ['"temperature": -1', '"max_tokens": "x"', '"top_p": 0', '"stop": "\\ud800"'])
def test_strict_looks_at_sampling_values_too(wrong, emulated, tmp_path):
    files = Files(tmp_path)
    files.input.write_text(f'{{"prompt_token_ids": [5], "top_k": 3}}\n{{"prompt_token_ids": [5], {wrong}}}\n')
    named = wrong.partition(":")[0]
    code, said = generate(files, emulated, "--strict")
    assert code == 65 and re.search(
        f"1 of 2 lines cannot run: line 2: {named} has a value that is not legal; it must be", said
    ), said
    assert not files.output.exists()


def test_two_starts_do_not_go_on_with_one_output(emulated, tmp_path):
    files = files_of(tmp_path)
    with started(files, emulated, *OPTIONS) as run:
        run.wait_for_lines(1)
        run.process.send_signal(signal.SIGSTOP)  # it keeps its locks
        code, said = generate(files, emulated, *OPTIONS, "--resume")
        assert code == 2 and "another run is using" in said
        elsewhere = ("--run-dir", str(tmp_path / "elsewhere"))
        code, said = generate(files, emulated, *OPTIONS, "--resume", "--force", *elsewhere)
        assert code == 2 and "is being written by another run" in said
        run.process.send_signal(signal.SIGCONT)
        run.end()
        assert run.process.returncode == 0
    assert len(answers(files)) == NUM_ROWS


def test_a_line_of_which_nobody_can_tell_the_id_is_in_no_other_rows_way(emulated, tmp_path):
    """The error has the line number as its id, which another row may also have, in any order."""
    files = Files(tmp_path)
    rows = [{"id": name, "prompt_token_ids": [3, 4, 5]} for name in ("5", "1", "2", "3", "4", "6")]
    lines = [json.dumps(row) for row in rows]
    bad = ['{"id": "x", "prompt_token_ids": [3', '{"id": "y", "prompt_token_ids": [4']
    # The third and the fifth line: one before and one after the row that has such an id.
    files.input.write_text("\n".join([*lines[:2], bad[0], lines[2], bad[1], *lines[3:]]) + "\n")
    with started(files, emulated, *OPTIONS) as run:
        said = run.end()
        assert run.process.returncode == 3, said
    whole = files.output.read_text().splitlines(keepends=True)
    expected = sorted([(row["id"], None) for row in rows] + [("3", 3), ("5", 5)], key=str)

    def found() -> list[tuple[str, int | None]]:
        parsed = map(json.loads, files.output.read_text().splitlines())
        return sorted(((row["id"], row.get("error", {}).get("line")) for row in parsed), key=str)

    assert found() == expected
    for line in whole if thinning.full else whole[::3]:  # a killed start may not have written any of these yet
        files.output.write_text("".join(other for other in whole if other != line))
        with started(files, emulated, *OPTIONS, "--resume") as run:
            said = run.end()
            assert run.process.returncode == 3, said
        assert found() == expected
