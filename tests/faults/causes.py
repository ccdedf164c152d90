"""Causes that end runs: each with its exit code, and whether an unchanged second start could end differently.

Schedulers restart a run that ended with 75 (launch/slurm.sbatch, launch/kubernetes). So 75 is only for causes that
another start can fix.
"""

from __future__ import annotations

from typing import NamedTuple

_CODES, _INSIDE = "faults/test_exit_codes.py::test_", "faults/test_inside.py::test_"
_SLOW, _KILL = "faults/test_slow.py::test_", "faults/test_kill.py::test_"
_SIGNALS, _NO_ROOM = "faults/test_signals.py::test_", "faults/test_no_room.py::test_"
_NETWORK, _REFUSED = "faults/test_network.py::test_", "commands/test_generate_refusals.py::test_"


class Cause(NamedTuple):
    """A cause that ends runs.

    Attributes:
        helps: an unchanged second start may end differently.
        shown: the test that makes the cause happen.
    """

    what: str
    code: int
    helps: bool
    shown: str


CAUSES = (
    Cause("every row is answered", 0, False, "faults/test_resume.py::test_what_is_done_is_not_done_again"),
    Cause("some rows are errors", 3, False, f"{_REFUSED}bad_rows_get_their_error_and_the_others_their_answer"),
    Cause("an output that the KV cache cannot hold", 3, False,
          "engine/test_small_kv_cache.py::test_with_more_memory_a_resumed_run_answers_what_did_not_fit"),
    Cause("an option that cannot work", 2, False, f"{_CODES}an_option_that_no_stage_can_honour_is_2_and_said_once"),
    Cause("weights of all ranks do not fit", 2, False,
          f"{_NO_ROOM}ranks_of_a_host_that_fit_one_by_one_and_not_together_are_refused"),
    Cause("KV pages do not fit", 2, False, f"{_NO_ROOM}kv_pages_that_do_not_fit_are_refused_with_what_would"),
    Cause("ranks with different options", 2, False, f"{_INSIDE}ranks_with_other_options_do_not_mix"),
    Cause("a rank that never comes", 2, False, f"{_NETWORK}a_rank_that_never_comes_is_missed_in_time"),
    Cause("one layer takes longer than the timeout, twice", 2, False,
          f"{_SLOW}a_layer_longer_than_the_timeout_is_no_reason_to_start_again_and_again"),
    Cause("no memory for the first microbatch, twice", 2, False,
          "run/test_judged.py::test_what_fails_at_the_start_again_is_no_75_any_more"),
    Cause("an input of which no row can run", 65, False,
          f"{_REFUSED}an_input_without_a_row_that_can_run_is_refused_before_a_model_loads"),
    Cause("a model that is not there", 66, False, f"{_REFUSED}files_that_are_not_there_or_in_the_way"),
    Cause("a layer that raises", 70, False, f"{_INSIDE}an_exception_in_a_layer_is_shown_as_it_was"),
    Cause("a disk that is full", 74, False, "faults/test_full_disk.py::test_a_full_disk_loses_nothing"),
    Cause("weights that are pickled", 77, False, "checkpoint/test_support.py::test_pickled_weights_are_refused"),
    Cause("Ctrl-C", 130, False, f"{_SIGNALS}what_runs_is_finished"),
    Cause("SIGTERM: the machine is wanted back", 75, True, f"{_SIGNALS}what_runs_is_finished"),
    Cause("a stage is killed", 75, True, f"{_KILL}a_killed_stage_ends_the_run_with_75"),
    Cause("a stage is killed while it loads", 75, True, f"{_KILL}a_stage_killed_during_set_up_leaves_the_code_too"),
    Cause("a stage is stopped", 75, True, f"{_CODES}a_stopped_stage_is_named_when_the_timeout_is_over"),
    Cause("a stage is stopped in set-up", 75, True,
          f"{_SLOW}a_rank_that_is_stopped_in_set_up_is_lost_in_time_and_its_phase_named"),
    Cause("a stage hangs in a layer, for the first time", 75, True,
          f"{_INSIDE}a_stage_that_hangs_is_named_and_shows_its_stacks"),
    Cause("a stage hangs while it loads", 75, True, f"{_INSIDE}a_stage_that_never_ends_loading_is_named"),
    Cause("a network that is gone", 75, True,
          f"{_NETWORK}a_network_that_swallows_packets_ends_both_and_the_run_can_be_gone_on_with"),
    Cause("no memory for a microbatch in mid-run", 75, True, "engine/test_out_of_memory.py::test_there_is_no_third"),
)  # fmt: skip
