"""The run directory: files that --overwrite removes, its owner, and a full disk."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from sarathi_pp.errors import CapacityError, ConfigError, OutputError
from sarathi_pp.outputs.run_directory import RunDirectory, own_command


def leave_a_run(path: Path) -> None:
    """Leave the files of a run, and of one that was killed in the middle of a write."""
    (path / "attempt-0000").mkdir(parents=True)
    (path / "attempt-0000" / "trace-00000-of-00001.jsonl").write_text("{}")
    for name in ("run.json", "report.json", "exit_code", ".report.json.123.part"):
        (path / name).write_text("{}")


def test_overwrite_removes_what_a_run_left(tmp_path):
    leave_a_run(tmp_path)
    with pytest.raises(ConfigError, match="exists; use --overwrite"), RunDirectory.claim(tmp_path, overwrite=False):
        pass
    assert len(list(tmp_path.iterdir())) == 5
    with RunDirectory.claim(tmp_path, overwrite=True) as run:
        run.joining(tmp_path, run.attempt, own=True)
        run.begin({"new": True})
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["attempt-0001", "run.json"]
        # As on another host with a directory of its own.
        (tmp_path / "there" / "attempt-0000").mkdir(parents=True)
        there = RunDirectory(tmp_path / "there").joining(tmp_path, 1, own=True, replaces=run.replaces)
        there.drop_replaced()
        assert [entry.name for entry in there.path.iterdir()] == ["attempt-0001"]
        assert run.read_run() == {"new": True} and tmp_path.stat().st_mode & 0o777 == 0o700


def test_an_attempt_that_is_a_link_is_unlinked_and_what_it_leads_to_stays(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    run = tmp_path / "run"
    run.mkdir()
    leave_a_run(run)
    (run / "attempt-0001").symlink_to(elsewhere)
    with RunDirectory.claim(run, overwrite=True) as claimed:
        claimed.begin({})
    assert [entry.name for entry in run.iterdir()] == ["run.json"] and (elsewhere / "kept").exists()


def test_ranks_that_share_a_directory_remove_what_was_there_together(tmp_path):
    """The ranks are two of a host other than rank 0's."""
    for number in range(20):
        old = tmp_path / "attempt-0000"
        old.mkdir()
        for file in range(40):
            (old / f"trace-{file:05d}-of-00040.jsonl").write_text("{}")
        ranks = [RunDirectory(tmp_path, attempt=number + 1, replaces=True) for _ in range(3)]
        with ThreadPoolExecutor(len(ranks)) as pool:
            list(pool.map(RunDirectory.drop_replaced, ranks))
        assert not list(tmp_path.iterdir())


def test_a_start_that_is_killed_while_it_claims_leaves_the_names_of_those_before_it(tmp_path, monkeypatch):
    """By these names the next start knows that it resumes with their answers."""
    with RunDirectory.claim(tmp_path, overwrite=False, launch_id="first"):
        pass

    def killed(*arguments: object, **named: object) -> None:
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(RunDirectory, "_write", killed)
        with (
            pytest.raises(InterruptedError),
            RunDirectory.claim(tmp_path, overwrite=False, resume=True, launch_id="second"),
        ):
            pass
    assert RunDirectory(tmp_path).launches() == ["first"]
    with RunDirectory.claim(tmp_path, overwrite=False, resume=True, launch_id="third") as run_dir:
        assert run_dir.launches() == ["first", "third"]
    with RunDirectory.claim(tmp_path, overwrite=False, resume=True) as run_dir:
        assert run_dir.launches() == []  # no names of a start that would never be restarted


@pytest.mark.parametrize("how", [{"overwrite": True}, {"overwrite": False, "resume": True}], ids=["replace", "resume"])
def test_a_start_that_is_refused_takes_nothing_away(how, tmp_path):
    """For example, too little memory shows when the model is loaded; by then this start owns the directory."""
    leave_a_run(tmp_path)
    before = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(CapacityError), RunDirectory.claim(tmp_path, **how):
        raise CapacityError("no room")
    after = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == {
        path: data
        for path, data in before.items()
        if path.name in ("run.json", "report.json") or path.parts[0] == "attempt-0000"
    } | {Path("unfinished"): b""}


@pytest.mark.parametrize("refused_before", ["it claims", "it begins"])
@pytest.mark.parametrize("code", [None, 75, 0])
def test_a_lost_run_is_known_as_one_behind_the_code_of_a_start_that_was_refused(code, refused_before, tmp_path):
    """By it another agent of the rendezvous resumes with its answers and does not replace them."""
    leave_a_run(tmp_path)
    (tmp_path / "exit_code").unlink()
    if code is not None:
        (tmp_path / "exit_code").write_text(f"{code}\n")
    if refused_before == "it claims":
        RunDirectory(tmp_path).write_refusal(2, overwrite=True)
        assert (RunDirectory(tmp_path).read_exit_code(), RunDirectory(tmp_path).is_unfinished()) == (2, code != 0)
    for _ in range(2):
        with RunDirectory.claim(tmp_path, overwrite=True) as run_dir:
            run_dir.write_exit_code(2)
        assert (run_dir.read_exit_code(), run_dir.is_unfinished()) == (2, code != 0)
    RunDirectory(tmp_path).write_end(0)  # of a start that found nothing left to do
    RunDirectory(tmp_path).write_refusal(2, overwrite=True)
    assert run_dir.read_exit_code() == 2 and not run_dir.is_unfinished()
    with RunDirectory.claim(tmp_path, overwrite=False, resume=True) as run_dir:
        run_dir.begin({})
        run_dir.write_exit_code(2)
    assert not run_dir.is_unfinished()


@pytest.mark.parametrize("holds", [True, False])
def test_a_rank_that_is_refused_writes_its_code_although_rank_0_has_the_directory(holds, tmp_path):
    with RunDirectory.claim(tmp_path / "run", overwrite=False, launch_id="mine") as run_dir:
        RunDirectory(run_dir.path).write_refusal(2, overwrite=False, launch_id="mine" if holds else "another")
        run_dir.write_exit_code(75)
    assert run_dir.read_exit_code() == (2 if holds else 75)


@pytest.mark.parametrize("name", ["prompts.jsonl", "attempt-0001", "run.json.bak", "answers.jsonl.run/run.json"])
def test_overwrite_removes_nothing_that_no_run_wrote(name, tmp_path):
    leave_a_run(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with (
        pytest.raises(ConfigError, match="was not written by sarathi-pp"),
        RunDirectory.claim(tmp_path, overwrite=True),
    ):
        pass
    assert (tmp_path / name).read_text() == "mine" and (tmp_path / "run.json").exists()


def test_a_file_is_no_run_directory(tmp_path):
    path = tmp_path / "file"
    path.write_text("mine")
    for overwrite, says in ((False, "exists"), (True, "was not written by sarathi-pp")):
        with pytest.raises(ConfigError, match=says), RunDirectory.claim(path, overwrite=overwrite):
            pass
    assert path.read_text() == "mine"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_that_a_run_is_using_is_left_alone(overwrite, tmp_path):
    with RunDirectory.claim(tmp_path / "run", overwrite=False):
        if overwrite:
            leave_a_run(tmp_path / "run")
        with (
            pytest.raises(ConfigError, match="another run is using"),
            RunDirectory.claim(tmp_path / "run", overwrite=overwrite),
        ):
            pass
        assert len(list((tmp_path / "run").iterdir())) == 5 * overwrite
    with RunDirectory.claim(tmp_path / "run", overwrite=overwrite):
        pass


def test_on_a_full_disk_the_report_is_an_output_error_and_the_code_no_matter(tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)

    def read_only(path, missing_ok=False):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", read_only)
    run = RunDirectory(tmp_path)
    with pytest.raises(OutputError, match="report.json: No space left on device"):
        run.write_report({})
    run.write_exit_code(74)


def test_a_code_that_another_thread_writes_meanwhile_is_whole(tmp_path, monkeypatch):
    """The watchdog's thread ends the process while the main thread still writes its exit code."""
    run, replace = RunDirectory(tmp_path), Path.replace

    def opened_and_no_more(partial, text):
        partial.write_bytes(b"")
        raise OSError(errno.EIO, "ended here")

    def while_another_begins(partial, path):
        with monkeypatch.context() as context:
            context.setattr(Path, "write_text", opened_and_no_more)
            run.write_exit_code(66)
        return replace(partial, path)

    monkeypatch.setattr(Path, "replace", while_another_begins)
    run.write_exit_code(70)
    assert (tmp_path / "exit_code").read_text() == "70\n"


@pytest.mark.parametrize("links", [True, False])
def test_a_loss_of_power_leaves_no_empty_file(links, tmp_path, monkeypatch):
    """The file's content is on disk before its name is. The record of how a run ended does not wait for the disk."""
    run, done, fsync = RunDirectory(tmp_path), [], os.fsync

    def synced(descriptor):
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        done.append("folder" if name == tmp_path.name else "file" if name.endswith(".part") else name)
        fsync(descriptor)

    def named(how, source, target):
        done.append("name")
        if how is link and not links:
            raise OSError(errno.EPERM, "Operation not permitted")
        return how(source, target)

    link, replace = os.link, Path.replace
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "link", lambda source, target: named(link, source, target))
    monkeypatch.setattr(Path, "replace", lambda source, target: named(replace, source, target))
    run.write_run({"some": "facts"})
    assert done == ["file", "name", "folder"]
    done.clear()
    run.write_exit_code(75)
    assert done == ["name", *([] if links else ["name"])]


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_that_syncs_nothing_is_taken_as_it_is(error, tmp_path, monkeypatch):
    """A file system that fails at a sync raises."""

    def fails(descriptor):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "fsync", fails)
    if error == errno.EIO:
        with pytest.raises(OutputError, match=r"run\.json: Input/output error"):
            RunDirectory(tmp_path).write_run({})
    else:
        RunDirectory(tmp_path).write_run({"some": "facts"})
        assert RunDirectory(tmp_path).read_run() == {"some": "facts"}


@pytest.mark.parametrize("links", [True, False])
def test_a_lost_peer_is_an_echo_of_any_code_that_is_there(links, tmp_path, monkeypatch):
    if not links:

        def no_links(source, target):
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", no_links)
    run, codes = RunDirectory(tmp_path), []
    for code in (75, 70, 75, 74):
        run.write_exit_code(code)
        codes.append((tmp_path / "exit_code").read_text())
    assert codes == ["75\n", "70\n", "70\n", "74\n"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["exit_code"]


def test_what_a_killed_thread_was_writing_is_in_nobodys_way(tmp_path):
    (tmp_path / "exit_code").write_text("75\n")
    (tmp_path / ".exit_code.0123456789abcdef.part").touch()
    RunDirectory.check(tmp_path, overwrite=False)


def test_a_code_that_another_rank_is_writing_is_no_run(tmp_path):
    """Rank 1 refuses to take part, and rank 0 checks the directory at that moment."""
    (tmp_path / ".exit_code.0123456789abcdef.part").touch()
    RunDirectory.check(tmp_path, overwrite=False)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="exists"):
        RunDirectory.check(tmp_path, overwrite=False)


def test_a_refusal_leaves_its_code_where_it_takes_no_runs_place(tmp_path):
    fresh, earlier, used = (RunDirectory(tmp_path / name) for name in ("fresh", "earlier", "used"))
    fresh.write_refusal(66, overwrite=False)
    fresh.write_refusal(2, overwrite=False)
    assert (fresh.path / "exit_code").read_text() == "2\n"
    RunDirectory.check(fresh.path, overwrite=False)
    earlier.write_run({})
    earlier.write_exit_code(0)
    earlier.write_refusal(66, overwrite=False)
    assert (earlier.path / "exit_code").read_text() == "0\n"
    earlier.write_refusal(66, overwrite=True)
    assert (earlier.path / "exit_code").read_text() == "66\n"
    with RunDirectory.claim(used.path, overwrite=True):
        used.write_refusal(66, overwrite=True)
        assert not list(used.path.iterdir())
    RunDirectory(tmp_path / "no" / "folder").write_refusal(66, overwrite=True)
    assert not (tmp_path / "no").exists()


def test_a_run_on_a_lost_host_is_waited_for(tmp_path):
    """Its lock is free after its lease is over."""
    path = tmp_path / "run"
    with ExitStack() as lost:
        lost.enter_context(RunDirectory.claim(path, overwrite=False))
        with pytest.raises(ConfigError, match="another run is using"), RunDirectory.claim(path, overwrite=True):
            pass
        lease = threading.Timer(0.3, lost.close)
        lease.start()
        with RunDirectory.claim(path, overwrite=True, patience_s=60.0):
            lease.join()


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["/usr/bin/sarathi-pp", "generate", "-i", "p"], ["sarathi-pp", "generate", "-i", "p"]),
        (["/x/sarathi_pp/__main__.py", "bench"], ["sarathi-pp", "bench"]),
        (["ask.py", "a prompt"], None),
        (["/x/other/__main__.py", "a prompt"], None),
        ([], None),
    ],
)
def test_only_a_command_of_ours_is_written_down(words, command):
    assert own_command(words) == command


def test_run_json_holds_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["sarathi-pp", "generate"])
    RunDirectory(tmp_path).write_run({"some": "facts"})
    assert RunDirectory(tmp_path).read_run() == {"some": "facts", "command": ["sarathi-pp", "generate"]}
