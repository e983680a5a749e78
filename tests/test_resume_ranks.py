"""Checkpoints of jobs of one, two and four processes; the checks stand in `resume_checks`."""

import pytest
from rank_runner import run_checks

CHECKS = [
    "killed_after_any_step_and_resumed_a_job_ends_with_the_same_bits",
    "another_number_of_processes_goes_on_from_the_same_tables",
    "a_process_alone_and_a_job_read_each_other_s_checkpoints",
    "gradients_that_wait_are_summed_for_another_number_of_processes",
    "rows_that_are_in_no_file_are_missed",
    "sigterm_in_one_process_stops_all_after_the_same_step",
    "a_loss_that_is_not_finite_stops_every_process_at_the_same_step",
    "an_error_in_one_process_is_one_in_all",
    "machines_without_a_common_folder_need_a_url",
]


@pytest.fixture(scope="module")
def outcomes():
    """What came of the checks in two processes; they are started once."""
    return run_checks("resume_checks", CHECKS, 2)


@pytest.mark.parametrize("check", CHECKS)
def test_two_processes_that_are_stopped_and_go_on(outcomes, check):
    assert outcomes[check] == ""


@pytest.mark.slow
def test_four_processes_go_on_from_two_and_two_from_four():
    check = "another_number_of_processes_goes_on_from_the_same_tables"
    assert run_checks("resume_checks", [check], 4) == {check: ""}
