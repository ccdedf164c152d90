"""Faults and bad inputs that a run must survive, and the tests that make each of them happen.

The numbers are those of the project's list of faults. A test's name is its file, two colons and its function.
"""

from __future__ import annotations

_ROWS, _SOURCE, _SINK = "inputs/test_parse.py::test_", "inputs/test_source.py::test_", "outputs/test_sink.py::test_"
_TEXT, _REFUSED = "text/test_tokenizer.py::test_", "commands/test_generate_refusals.py::test_"
_WEIGHTS, _SUPPORT = "model/test_weights.py::test_", "checkpoint/test_support.py::test_"
_RESUME, _SIGNALS, _INSIDE = (
    "faults/test_resume.py::test_",
    "faults/test_signals.py::test_",
    "faults/test_inside.py::test_",
)
_KILL, _CODES, _SECURITY = (
    "faults/test_kill.py::test_",
    "faults/test_exit_codes.py::test_",
    "faults/test_security.py::test_",
)
_BAD, _FUZZ, _WIRE = "faults/test_bad_values.py::test_", "faults/test_fuzz.py::test_", "wire/test_codec.py::test_"
_KINDS, _SETTINGS = "text/test_tokenizer_kinds.py::test_", "inputs/test_generation_config.py::test_"
_LARGE = "faults/test_large_rows.py::test_"
_UNHEARD = "faults/test_nobody_listens.py::test_"
_NETWORK, _HUB = "faults/test_network.py::test_", "faults/test_hub.py::test_"
_EDGE = "wire/test_torch_channel.py::test_"
_ENVIRONMENTS = "faults/test_environments.py::test_"
_LLM = "api/test_llm_use.py::test_"
_SOAK = "faults/test_soak.py::test_every_row_is_accounted_for"

CASES: dict[int, tuple[str, tuple[str, ...]]] = {
    1: ("a line that is no JSON", (
        f"{_ROWS}a_bad_line_names_what_is_wrong",
        f"{_RESUME}strict_refuses_a_file_with_a_bad_line_before_anything_runs", _SOAK)),
    2: ("ids that are missing or occur twice", (
        f"{_SOURCE}an_id_that_was_seen_gives_an_error_with_both_lines",
        f"{_RESUME}a_line_of_which_nobody_can_tell_the_id_is_in_no_other_rows_way", _SOAK)),
    3: ("blank lines, BOM, CRLF, no final newline, invalid UTF-8", (
        f"{_ROWS}lines_with_bom_crlf_blanks_and_no_final_newline",
        f"{_ROWS}invalid_utf8_keeps_an_id_that_can_be_read")),
    4: ("an empty file", (
        f"{_SOURCE}an_empty_file_is_exhausted_at_once",
        f"{_CODES}a_file_without_a_row_is_answered_by_one_without_a_line")),
    5: ("a line of gigabytes", (
        f"{_ROWS}a_line_over_the_cap_is_cut_and_skipped_without_being_held",
        f"{_SOURCE}memory_does_not_grow_with_the_file", f"{_LARGE}a_long_prompt_takes_no_more_than_its_line",
        f"{_TEXT}a_text_that_cannot_fit_is_refused_before_it_is_encoded")),
    6: ("an empty prompt", (f"{_TEXT}an_empty_prompt_is_bos_or_an_error", _SOAK)),
    7: ("a prompt above the model's length", (
        f"{_SOURCE}a_prompt_that_cannot_fit_is_refused_and_one_that_just_fits_is_not", _SOAK)),
    8: ("a prompt of just that length, an output beyond it", (
        f"{_SOURCE}a_prompt_that_cannot_fit_is_refused_and_one_that_just_fits_is_not",
        "exact/test_exactness.py::test_outputs_end_at_the_longest_legal_sequence")),
    9: ("a prompt above the whole KV pool", (
        f"{_SOURCE}a_prompt_that_cannot_fit_is_refused_and_one_that_just_fits_is_not",)),
    10: ("sampling parameters out of range, or unknown", (
        f"{_REFUSED}bad_rows_get_their_error_and_the_others_their_answer",
        "inputs/test_generation_config.py::test_values_out_of_range_blame_the_command_or_the_line", _SOAK)),
    11: ("parameters that others know and this runtime does not", (
        f"{_ROWS}a_bad_line_names_what_is_wrong", _SOAK)),
    12: ("token ids that the embedding does not have", (
        f"{_TEXT}token_ids_are_those_of_the_embedding", f"{_TEXT}a_tokenizer_of_another_model_is_refused", _SOAK)),
    13: ("chat templates that are missing, fail or do not end", (
        f"{_TEXT}chat_templates_that_fail_are_row_errors", f"{_TEXT}a_chat_template_that_does_not_end_is_a_row_error",
        f"{_TEXT}what_one_expression_of_a_template_takes_is_bounded",
        f"{_LARGE}a_template_that_takes_all_there_is_costs_its_row_alone",
        f"{_LARGE}a_signal_is_heeded_while_a_template_computes")),
    14: ("stop strings across borders, and empty ones", (
        f"{_TEXT}a_stop_string_is_seen_across_tokens_and_split_characters",
        f"{_TEXT}incremental_stops_are_those_of_the_full_decode")),
    15: ("an output that is the input, a directory, there already or not writable", (
        f"{_SINK}what_is_refused_before_anything_runs", f"{_REFUSED}files_that_are_not_there_or_in_the_way",
        f"{_CODES}an_output_inside_of_the_run_directory_is_refused",
        f"{_CODES}a_start_that_is_refused_late_takes_nothing_away")),
    16: ("a disk that fills up in mid-run", ("faults/test_full_disk.py::test_a_full_disk_loses_nothing",)),
    17: ("half a last line after a kill", (
        "outputs/test_journal.py::test_a_kill_at_any_byte_loses_at_most_the_torn_line",
        f"{_RESUME}a_job_that_is_killed_as_a_whole_goes_on")),
    18: ("going on with another model, other parameters, another input", (
        f"{_RESUME}another_question_is_refused_with_what_is_different",
        f"{_RESUME}force_goes_on_with_other_parameters",
        f"{_RESUME}a_run_directory_belongs_to_one_output",
        "outputs/test_run_identity.py::test_another_model_is_another_run")),
    19: ("two runs on one output", (f"{_RESUME}two_starts_do_not_go_on_with_one_output",)),
    20: ("a reader that goes away", (
        f"{_CODES}a_reader_that_leaves_ends_the_run_without_a_traceback",
        f"{_UNHEARD}a_pipe_that_nobody_reads_ends_no_run", f"{_UNHEARD}a_terminal_that_was_closed_ends_no_run",
        f"{_UNHEARD}a_report_that_nobody_reads_is_no_crash")),
    21: ("Ctrl-C, once and twice", (
        f"{_SIGNALS}what_runs_is_finished", f"{_SIGNALS}the_second_signal_ends_it_at_once")),
    22: ("SIGTERM and SIGUSR1, also while nothing comes back", (
        f"{_SIGNALS}what_runs_is_finished", f"{_SIGNALS}a_stage_that_is_silent_is_not_waited_for",
        f"{_SIGNALS}while_the_input_is_looked_through_there_is_nothing_to_finish",
        f"{_SIGNALS}under_torchrun_too", f"{_SIGNALS}a_signal_to_every_process_is_one_signal",
        f"{_SIGNALS}signals_until_the_process_has_ended_change_no_exit_code",
        "process/test_watchdog.py::test_more_signals_end_it_no_later_than_the_first_two",
        f"{_EDGE}a_wait_that_a_signal_interrupts_ends_in_time",
        "process/test_signals.py::test_one_that_comes_while_an_object_is_finalised_is_raised_after_it")),
    23: ("SIGKILL of a stage, each of them", (
        f"{_KILL}a_killed_stage_ends_the_run_with_75", f"{_RESUME}a_stage_that_is_killed_is_started_again",
        f"{_RESUME}stages_that_are_killed_at_random_moments_again_and_again",
        f"{_SECURITY}nothing_is_left_outside_the_run_directory")),
    24: ("a stage that is stopped or hangs", (
        f"{_CODES}a_stopped_stage_is_named_when_the_timeout_is_over",
        f"{_INSIDE}a_stage_that_hangs_is_named_and_shows_its_stacks",
        f"{_INSIDE}a_stage_that_hangs_ends_though_nobody_reads_what_it_says",
        f"{_INSIDE}a_stage_that_never_ends_loading_is_named",
        f"{_INSIDE}a_rank_0_that_is_stopped_in_set_up_holds_nobody",
        "distributed/test_control_plane.py::test_a_store_whose_holder_is_stopped_is_not_waited_for")),
    25: ("a network that swallows packets", (
        f"{_NETWORK}a_network_that_swallows_packets_ends_both_and_the_run_can_be_gone_on_with",
        f"{_NETWORK}a_network_that_comes_back_in_time_costs_no_answer")),
    26: ("an exception in a layer", (f"{_INSIDE}an_exception_in_a_layer_is_shown_as_it_was",)),
    27: ("a rank that never comes, another number of ranks, more stages than layers", (
        f"{_NETWORK}a_rank_that_never_comes_is_missed_in_time",
        f"{_NETWORK}ranks_that_were_told_of_other_numbers_are_refused",
        f"{_NETWORK}a_host_without_the_model_is_named_on_all_and_holds_nobody",
        "distributed/test_rendezvous.py::test_who_is_missing_is_named_to_all_that_came",
        "core/test_partition.py::test_errors_name_the_numbers")),
    28: ("a port that is taken, a store that is stale", (
        f"{_NETWORK}an_address_where_rank_0_cannot_be_met_is_refused",
        "faults/test_rendezvous.py::test_a_rendezvous_id_that_was_used_before_is_refused_and_a_new_one_runs",
        "faults/test_rendezvous.py::test_a_new_agent_goes_on_with_what_a_lost_one_has_answered",
        "distributed/test_rendezvous.py::test_all_have_one_part_and_no_start_has_anothers",
        "run/test_metrics.py::test_a_taken_port_is_refused_with_its_number_and_a_way_out",
        f"{_RESUME}stages_that_are_killed_at_random_moments_again_and_again")),
    29: ("ranks of other releases or with other options", (
        "distributed/test_fingerprint.py::test_whatever_differs_is_named_with_both_values",
        f"{_INSIDE}ranks_of_another_release_do_not_mix", f"{_INSIDE}ranks_with_other_options_do_not_mix")),
    30: ("ranks with other model files", (f"{_INSIDE}ranks_with_other_weights_do_not_mix",)),
    31: ("wire messages that are short, long, replayed or damaged", (
        f"{_FUZZ}the_frame_decoder_survives_any_bytes", f"{_WIRE}any_damaged_byte_of_head_or_body_is_seen",
        f"{_WIRE}a_cut_message_is_refused", f"{_WIRE}a_message_cut_over_what_an_earlier_one_left_is_refused",
        f"{_EDGE}what_is_not_the_next_whole_message_ends_the_edge",
        f"{_EDGE}a_message_that_the_peer_would_not_take_is_not_sent")),
    32: ("shards and tensors that are missing or of another shape", (
        f"{_WEIGHTS}a_missing_shard_is_named", f"{_WEIGHTS}a_tensor_that_its_shard_lacks_is_named",
        "model/test_stage_model.py::test_a_tensor_without_a_place_is_refused",
        "model/test_stage_model.py::test_a_wrong_shape_is_refused")),
    33: ("safetensors that are cut short or damaged", (
        f"{_WEIGHTS}a_corrupt_file_is_named", f"{_WEIGHTS}no_damage_to_a_header_gets_through",
        "checkpoint/test_checksums.py::test_a_flipped_bit_is_found")),
    34: ("pickled weights", (f"{_WEIGHTS}pickled_weights_are_refused_with_a_way_out",)),
    35: ("paths that leave the model directory", (
        f"{_WEIGHTS}an_index_cannot_point_out_of_the_model", f"{_WEIGHTS}a_link_out_of_the_model_is_refused")),
    36: ("code that comes with a model", (f"{_SUPPORT}custom_code_is_not_run",)),
    37: ("models that are not proven", (f"{_SUPPORT}what_is_not_proven_is_refused_in_a_line",)),
    38: ("a hub that cannot be reached, a repository that is missing or gated", (
        f"{_HUB}no_network", f"{_HUB}a_repository_that_is_missing_or_gated_or_a_hub_that_is_ill",
        f"{_HUB}a_hub_that_does_not_answer", f"{_HUB}a_model_is_fetched_once_and_then_needs_no_hub",
        "checkpoint/test_fetch.py::test_config_comes_first_and_one_format_of_the_weights_last",
        "checkpoint/test_fetch.py::test_what_cannot_run_is_refused_with_nothing_but_its_config_fetched")),
    39: ("values that are not finite", (
        f"{_BAD}what_float16_does_not_hold_ends_its_request_alone",
        f"{_BAD}the_neighbours_are_unharmed", f"{_BAD}the_first_bad_stage_is_named", _SOAK)),
    40: ("no memory at the start, or in mid-run", (
        f"{_REFUSED}a_start_that_was_refused_is_not_in_the_way_of_the_next",
        "faults/test_no_room.py::test_kv_pages_that_do_not_fit_are_refused_with_what_would",
        "faults/test_no_room.py::test_weights_that_do_not_fit_are_refused_before_they_are_read",
        "faults/test_no_room.py::test_no_memory_in_the_middle_of_loading_is_not_taken_for_a_bad_checkpoint",
        "mockgpu/inside/check_working_memory.py::test_the_largest_microbatch_of_a_policy_is_measured",
        "mockgpu/inside/check_working_memory.py::test_tokens_and_the_most_drawn_rows_are_in_it",
        "mockgpu/inside/check_working_memory.py::test_a_gpu_without_room_for_it_is_named_with_what_helps",
        "faults/test_no_room.py::test_ranks_of_a_host_that_fit_one_by_one_and_not_together_are_refused",
        "process/test_host.py::test_limits_of_the_container_decide_budgets_and_threads",
        "faults/test_cgroup.py::test_budgets_and_threads_are_of_the_cgroup",
        "stages/test_memory_demand.py::test_eight_stages_that_fit_one_by_one_and_not_together_are_refused",
        f"{_INSIDE}no_memory_once_costs_no_answer", "engine/test_out_of_memory.py::test_there_is_no_third")),
    41: ("a KV pool that decodes exhaust", (
        "exact/test_exactness.py::test_preempted_sequences_are_recomputed_to_the_same_tokens",)),
    42: ("pages that are lost or freed twice", (
        "core/test_pages.py::test_giving_back_twice_fails_at_once",
        "core/test_coordinator.py::test_drains_conserves_and_never_changes_an_output")),
    43: ("one endless request among short ones", (
        "core/test_policies.py::test_one_endless_request_holds_up_no_other",
        "core/test_policies.py::test_with_endless_newcomers_the_oldest_request_finishes_within_a_bound")),
    44: ("stages of unequal speed", (
        "report/test_advice.py::test_stages_of_unequal_speed_are_cut_anew",
        "report/test_advice.py::test_one_slow_stage_is_evened_out")),
    45: ("clocks that differ", (
        "analysis/test_bubbles.py::test_clock_offsets_are_applied_and_interpolated",
        "distributed/test_clock_sync.py::test_the_uncertainty_holds_where_one_way_takes_all_the_time")),
    46: ("a run without a microbatch, or with one", (
        "analysis/test_summary.py::test_run_without_a_result_is_null_not_an_error",
        "analysis/test_summary.py::test_one_microbatch", f"{_RESUME}what_is_done_is_not_done_again")),
    47: ("the same seed, cut and batched in other ways", (
        "exact/test_sampling_invariance.py::test_samples_do_not_depend_on_how_the_work_is_cut",
        "inputs/test_source.py::test_a_row_keeps_its_seed_wherever_it_stands",
        f"{_RESUME}a_job_that_is_killed_as_a_whole_goes_on")),
    48: ("prompts in logs, open ports, readable outputs", (
        f"{_SECURITY}prompts_are_in_no_log", f"{_SECURITY}nobody_outside_this_machine_can_connect",
        f"{_SECURITY}what_is_left_is_private", "run/test_metrics.py::test_only_loopback_is_served")),
    49: ("a KV cache that is too small for an output", (
        "core/test_coordinator.py::test_an_answer_is_that_of_an_unlimited_kv_cache_or_an_error",
        "engine/test_small_kv_cache.py::test_with_more_memory_a_resumed_run_answers_what_did_not_fit")),
    50: ("thousands of the longest prompts waiting", (
        "core/test_coordinator.py::test_a_waiting_prompt_is_held_once_in_four_bytes_a_token",
        f"{_SOURCE}long_prompts_are_read_ahead_up_to_a_number_of_tokens",
        "engine/test_admission.py::test_long_prompts_wait_up_to_a_number_of_tokens")),
    51: ("a kernel cache that is damaged, full, foreign or not writable", (
        "kernels/cpu/test_kernel_cache.py::test_a_crash_or_damage_at_any_place_changes_no_kernel",
        "kernels/cpu/test_kernel_cache.py::test_what_cannot_be_read_or_written_costs_a_compilation_and_one_warning",
        "kernels/cpu/test_kernel_cache.py::test_whatever_decides_the_code_decides_the_file")),
    52: ("processes that compile the same kernel at the same time", (
        "kernels/cpu/test_kernel_cache.py::test_one_process_compiles_and_the_others_wait",
        "kernels/cpu/test_kernel_cache.py::test_two_writers_touch_no_file_of_each_other")),
    53: ("environments of pods and sandboxes: variables of a lone process, no loopback, no /proc", (
        f"{_ENVIRONMENTS}variables_that_name_no_other_rank_leave_stages_its_meaning",
        f"{_ENVIRONMENTS}a_rank_that_cannot_be_is_refused",
        f"{_ENVIRONMENTS}a_loopback_that_is_down_is_named_once_before_anything_starts",
        f"{_ENVIRONMENTS}without_proc_a_run_works")),
    54: ("an input that is a table, an archive, a JSON document or in another encoding", (
        "inputs/test_input_format.py::test_what_is_not_text_is_named_whatever_its_name",
        "inputs/test_input_format.py::test_json_that_is_not_lines_is_named_with_the_way_to_them",
        "inputs/test_input_format.py::test_a_table_is_named_with_the_way_to_rows",
        "inputs/test_input_format.py::test_no_json_is_ever_prose",
        "inputs/test_input_format.py::test_a_stream_is_decided_on_its_first_line_while_its_writer_waits",
        f"{_REFUSED}a_stream_that_is_no_lines_is_named_as_what_it_is")),
    55: ("an input of which no row can run", (
        f"{_REFUSED}an_input_without_a_row_that_can_run_is_refused_before_a_model_loads",
        f"{_REFUSED}text_for_a_model_without_a_tokenizer_is_refused_before_it_loads")),
    56: ("keys of the user's own, and parameters with a typing mistake", (
        f"{_ROWS}keys_of_the_users_own_are_kept_and_change_nothing",
        f"{_ROWS}a_summary_names_the_key_and_quotes_no_value",
        f"{_SINK}keys_of_the_users_own_come_back_beside_an_answer_and_an_error")),
    57: ("answers to a stream, a device or a file that is full", (
        "faults/test_streams.py::test_answers_to_a_stream_leave_nothing_behind",
        "faults/test_streams.py::test_a_run_whose_reader_left_leaves_nothing_and_says_nothing",
        f"{_CODES}a_full_disk_is_74_and_said_once",
        "commands/test_report_commands.py::test_a_full_disk_under_standard_output_is_one_line_and_74")),
    58: ("ranks that only notice that another one has ended", (
        f"{_CODES}a_start_that_is_refused_under_torchrun_says_so_once", f"{_CODES}a_second_interrupt_is_one_message")),
    59: ("an output that cannot encode a character", (
        "commands/test_report_commands.py::test_a_terminal_without_unicode_gets_the_whole_table",)),
    60: ("a run without end", (
        "commands/test_growth.py::test_nothing_grows_with_the_number_of_rows",
        "inputs/test_ids.py::test_an_id_takes_few_bytes",
        "trace/test_recorder.py::test_a_file_has_a_largest_size_and_is_cut_there",
        "analysis/test_summary.py::test_a_trace_that_was_cut_gives_the_figures_of_its_first_part")),
    61: ("more events than the disk takes", (
        "trace/test_recorder.py::test_where_the_disk_stands_still_the_queue_is_bounded_and_the_loss_is_told",
        "trace/test_recorder.py::test_a_writer_that_is_behind_is_waited_for_and_nothing_is_lost")),
    62: ("an earlier start that still writes, where locks are missing or outlive their host", (
        "outputs/test_journal.py::test_without_locks_an_earlier_start_writes_nothing_more",
        "outputs/test_journal.py::test_a_lock_of_a_lost_host_is_waited_for",
        "outputs/test_run_directory.py::test_a_run_on_a_lost_host_is_waited_for")),
    63: ("resuming with an input that has grown, or with nothing left to do", (
        "outputs/test_run_identity.py::test_lines_may_be_appended_to_an_input",
        f"{_RESUME}lines_that_were_appended_to_the_input_are_answered", f"{_RESUME}what_is_done_is_not_done_again")),
    64: ("a user who sees nothing happen after Ctrl-C", (
        "run/test_stop_notice.py::test_it_counts_what_the_last_report_has_running",
        f"{_SIGNALS}what_runs_is_finished", f"{_SIGNALS}the_second_signal_ends_it_at_once")),
    65: ("a class name that is not tokenizer.json's, and text cut off from its prompt", (
        f"{_KINDS}ids_and_text_are_those_of_tokenizer_json_under_any_class_name",
        f"{_KINDS}text_is_what_transformers_pipeline_adds_to_the_prompt",
        f"{_KINDS}text_and_stops_are_those_of_decoding_everything",
        f"{_TEXT}a_prompt_that_was_rendered_before_gets_no_second_bos")),
    66: ("settings of a model that are in another file, or not supported", (
        f"{_SETTINGS}settings_count_from_every_file_that_transformers_reads",
        f"{_SETTINGS}every_setting_that_transformers_knows_is_classified",
        f"{_REFUSED}a_model_that_asks_for_beams_runs_without_them_if_line_or_command_says_so")),
    67: ("another kind of model, and files that are pointers", (
        "checkpoint/test_kind.py::test_a_folder_of_another_kind_is_named",
        "checkpoint/test_kind.py::test_a_class_of_another_kind_is_named",
        "checkpoint/test_kind.py::test_any_file_may_be_a_pointer")),
    68: ("a wrong value in config.json", (
        "checkpoint/test_pretrained.py::test_a_wrong_value_is_named_or_changes_nothing",
        "checkpoint/test_pretrained.py::test_the_key_and_its_value_are_named")),
    69: ("tensors that decide nothing, and types that are not computed in", (
        "checkpoint/test_surplus.py::test_what_decides_nothing_is_left_aside",
        "checkpoint/test_surplus.py::test_what_could_decide_something_is_an_error",
        "checkpoint/test_surplus.py::test_a_weight_of_another_type_is_named_with_it")),
    70: ("an exception or an interrupt in a long-lived program, and a call afterwards", (
        "api/test_use_after_failure.py::test_after_an_exception_at_any_call_the_next_run_answers_or_says_why",
        "engine/test_dispatcher.py::test_after_an_exception_no_replica_goes_on_with_what_was_asked_before",
        f"{_LLM}after_an_exception_the_next_call_answers", f"{_LLM}an_interrupt_at_any_instant_harms_nothing",
        f"{_LLM}an_interrupt_of_two_stages_harms_nothing_and_a_lost_stage_is_told_at_once",
        f"{_LLM}an_interrupted_start_leaves_no_worker")),
    71: ("calls of several threads, and a close during one", (
        f"{_LLM}calls_of_several_threads_each_get_their_own_answers",
        f"{_LLM}who_closes_ends_what_another_thread_generates")),
    72: ("a worker of an LLM that ends before it has joined", (
        f"{_LLM}workers_that_end_before_they_join_are_named",)),
    73: ("several LLMs in one process, also next to the program's own process group", (
        f"{_LLM}two_at_once_and_one_beside_a_group_of_the_program",
        f"{_LLM}one_after_the_other_leaves_nothing_behind")),
    74: ("a stage, or a rank in set-up, that is slow and gets on", (
        "faults/test_slow.py::test_a_microbatch_of_three_timeouts_in_small_steps_runs_to_its_end",
        "faults/test_slow.py::test_each_phase_of_set_up_may_take_longer_than_a_rank_may_be_silent")),
    75: ("a start that cannot succeed however often it is repeated", (
        "faults/test_slow.py::test_a_layer_longer_than_the_timeout_is_no_reason_to_start_again_and_again",
        "faults/test_causes.py::test_75_is_for_what_another_start_can_mend")),
    76: ("an option that is wrong, and a model that takes long to come", (
        "run/test_preflight.py::test_options_are_checked_before_the_model_is_looked_for",)),
}  # fmt: skip
