"""Sharded tables, in one, two and four processes; the checks stand in `sharded_checks`."""

import pytest
from rank_runner import run_checks

CHECKS = [
    "updates_equal_one_process_on_the_whole_batch",
    "no_row_at_all_is_a_step_like_any_other",
    "frozen_steps_run_no_backward_and_leave_every_bit",
    "a_thousand_frozen_steps_take_no_more_memory",
    "the_first_update_after_a_thaw_equals_a_fresh_optimizers",
    "a_thaw_may_keep_the_state",
    "a_frozen_table_beside_one_that_trains_keeps_every_bit",
    "closed_rows_keep_every_bit_and_newly_open_ones_start_fresh",
    "padding_rows_stay_zero_and_replaced_rows_train_afresh",
    "the_first_process_gathers_a_table_chunk_by_chunk",
    "a_saved_state_goes_on_without_a_changed_bit",
    "a_saved_state_of_one_engine_goes_on_in_the_other",
    "prefetch_equals_a_late_reference_written_by_hand",
    "ids_are_deduplicated_before_they_travel_in_one_exchange_a_width",
    "all_tables_share_an_exchange_of_distinct_rows",
    "random_delays_change_no_bit",
    "a_table_alone_and_one_held_whole_answer_too",
    "what_cannot_be_sharded_is_refused",
    "another_backend_than_gloo_is_refused",
    "what_torchrec_does_not_take_is_refused",
]


@pytest.fixture(scope="module")
def outcomes(request):
    """What came of the checks with a number of processes; they are started once."""
    return run_checks("sharded_checks", CHECKS, request.param)


@pytest.mark.parametrize(
    "outcomes", [1, 2, pytest.param(4, marks=pytest.mark.slow)], indirect=True, scope="module"
)
@pytest.mark.parametrize("check", CHECKS)
def test_sharded_tables(outcomes, check):
    assert outcomes[check] == ""
