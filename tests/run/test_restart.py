"""Behaviour of a restart with existing files: it resumes its own run and leaves the files of other runs alone."""

from dataclasses import replace
from unittest.mock import Mock

import pytest

from sarathi_pp.config import RunConfig
from sarathi_pp.distributed.environment import RankEnvironment, find_environment, rendezvous_of
from sarathi_pp.errors import ConfigError
from sarathi_pp.outputs.run_directory import RunDirectory
from sarathi_pp.run import restart
from sarathi_pp.run.preflight import BatchOptions
from sarathi_pp.run.restart import is_restart

AGAIN = RankEnvironment(world_size=2, restart=1, launch_id="this one")


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out.jsonl"


def job(output, start="new"):
    return BatchOptions(RunConfig(model="m"), "in.jsonl", str(output), start=start)


def as_restarted(job, env, warn=lambda text: None):
    return restart.as_restarted(job, env, Mock(warn=warn))


def leave(output, *, by, identity=True, lines="line\n", begun_by=None, ended=None):
    """Leave the files of a start of that job.

    Args:
        begun_by: owner of the run.json, if the start had not yet written its own.
    """
    with RunDirectory.claim(RunDirectory.default_path(str(output)), overwrite=True, launch_id=by) as run_dir:
        if identity:
            run_dir.write_run({"identity": {"model": "m"}, "job": by if begun_by is None else begun_by})
        if ended is not None:
            run_dir.write_exit_code(ended)
    if lines is not None:
        output.write_text(lines)


@pytest.mark.parametrize("start", ["new", "replace", "resume"])
def test_what_this_job_has_answered_is_gone_on_with(start, output):
    leave(output, by="this one")
    assert is_restart(job(output, start), AGAIN)
    assert as_restarted(job(output, start), AGAIN).start == "resume"


@pytest.mark.parametrize(
    ("start", "lines", "then"),
    [("new", None, "replace"), ("new", "", "replace"), ("new", "line\n", "new"), ("replace", "line\n", "replace")],
)
def test_a_start_that_had_not_opened_its_output_begins_again(start, lines, then, output):
    leave(output, by="this one", identity=False, lines=lines)
    assert as_restarted(job(output, start), AGAIN).start == then


@pytest.mark.parametrize(("start", "then"), [("new", "new"), ("replace", "replace")])
def test_what_an_earlier_run_has_answered_is_not_gone_on_with(start, then, output):
    """This job was to replace it, and was lost before it did."""
    leave(output, by="this one", begun_by="another one")
    assert as_restarted(job(output, start), AGAIN).start == then


@pytest.mark.parametrize("by", ["", "another one"])
def test_another_jobs_output_is_not_gone_on_with(by, output):
    leave(output, by=by)
    assert not is_restart(job(output), AGAIN)
    assert as_restarted(job(output), AGAIN).start == "new"
    with pytest.raises(ConfigError, match="a restart does not replace"):
        as_restarted(job(output, "replace"), AGAIN)


def test_a_restart_that_torchrun_does_not_count_is_one_all_the_same(output):
    """Hosts came or left."""
    leave(output, by="this one")
    assert as_restarted(job(output, "replace"), replace(AGAIN, restart=0)).start == "resume"


@pytest.mark.parametrize(
    ("own", "earlier", "ended"),
    [
        ("this one", "another one", None),
        ("", "", None),
        ("named here 2", "named here 1", 0),
        ("named here 2", "named here 1", 2),
        ("named here 2", "nam ed here 1", None),
        ("none here 2", "none here 1", None),
        ("/tmp/a b/here", "/tmp/a b/there", 75),
    ],
)
def test_a_first_start_does_what_it_was_told(own, earlier, ended, output):
    """This includes one of the rendezvous of an earlier run that has ended, or of a rendezvous without a name."""
    leave(output, by=earlier, ended=ended)
    first = RankEnvironment(world_size=2, restart=0, launch_id=own)
    assert [as_restarted(job(output, start), first).start for start in ("new", "replace")] == ["new", "replace"]


@pytest.mark.parametrize("start", ["new", "replace"])
@pytest.mark.parametrize("ended", [None, 75])
@pytest.mark.parametrize("restart", [0, 1])
def test_a_start_on_another_agent_of_the_rendezvous_goes_on_with_a_lost_one(restart, ended, start, output):
    """The next start does the same, on any agent, if this one was lost before it had started work."""
    path = RunDirectory.default_path(str(output))
    leave(output, by="named here 1", ended=ended)
    second, third = (
        RankEnvironment(world_size=2, restart=restart, launch_id=f"named there {number}") for number in (2, 3)
    )
    said = []
    assert as_restarted(job(output, start), second, said.append).start == "resume"
    assert "of the rendezvous named was lost" in "".join(said)
    with RunDirectory.claim(path, overwrite=False, resume=True, launch_id=second.launch_id):
        pass
    assert [as_restarted(job(output, start), env).start for env in (second, third)] == ["resume"] * 2


def test_what_was_there_before_a_lost_start_is_not_gone_on_with_on_another_agent(output):
    """A run of the same name had ended; its replacement was lost before it had started work."""
    leave(output, by="named here 1", ended=0)
    leave(output, by="named here 2", identity=False)
    for own in ("named here 2", "named there 3"):
        assert as_restarted(job(output, "replace"), RankEnvironment(world_size=2, launch_id=own)).start == "replace"


def test_starts_of_one_agent_are_one_job():
    """Starts of one agent have the same parent process; starts of one launcher have the same directory."""
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    first, second = find_environment(ranks), find_environment({**ranks, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert first.launch_id == second.launch_id != find_environment({**ranks, "TORCHELASTIC_RUN_ID": "y"}).launch_id
    names = {
        name: rendezvous_of(find_environment({**ranks, "TORCHELASTIC_RUN_ID": name}).launch_id)
        for name in ("x", "a b", "none")
    }
    assert names == {"x": "x", "a b": "a%20b", "none": ""}
    stores = [
        find_environment({**ranks, "SARATHI_PP_STORE": f"/tmp/{name}"}).launch_id
        for name in ("a/s-0", "a/s-1", "b/s-0")
    ]
    assert stores[0] == stores[1] != stores[2]
