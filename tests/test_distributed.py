"""Training in one, two and four processes; the checks stand in `distributed_checks`."""

import pytest
from rank_runner import run_checks
from torch.distributed import DistBackendError, is_initialized

from thawline.errors import TrainingError
from thawline.training.distributed import joined

CHECKS = [
    "training_together_equals_one_process_on_all_requests",
    "weighted_requests_train_together_as_in_one_process",
    "uneven_processes_stop_at_the_same_step",
    "a_batch_of_padding_adds_nothing",
    "a_process_without_requests_trains",
    "an_epoch_without_a_batch_in_any_process_is_refused",
    "a_step_takes_one_lookup_and_one_sum_and_never_both_at_once",
    "fused_micro_batches_update_the_tables_each",
    "sums_are_over_all_processes",
    "every_process_gets_the_first_one_s_parameters",
]


@pytest.fixture(scope="module")
def outcomes(request):
    """What came of the checks with a number of processes; they are started once."""
    return run_checks("distributed_checks", CHECKS, request.param)


@pytest.mark.parametrize(
    "outcomes", [1, 2, pytest.param(4, marks=pytest.mark.slow)], indirect=True, scope="module"
)
@pytest.mark.parametrize("check", CHECKS)
def test_training_together(outcomes, check):
    assert outcomes[check] == ""


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"), TrainingError),
        (DistBackendError("NCCL error"), TrainingError),
        (RuntimeError("another one"), RuntimeError),
    ],
    ids=["gloo", "nccl", "something else"],
)
def test_a_broken_connection_points_to_the_other_processes(raised, seen):
    with pytest.raises(seen) as caught, joined("cpu", alone=True):
        raise raised
    assert ("connection to another process of the job broke" in str(caught.value)) == (
        seen is TrainingError
    )
    assert not is_initialized()
