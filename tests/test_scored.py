from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch

from thawline.errors import DataError
from thawline.evaluation.scored import concat, empty, from_batch


def batch(*, oracle: bool = False) -> SimpleNamespace:
    """Two requests: one of two candidates, one of three, where the last is not valid."""
    return SimpleNamespace(
        request_id=torch.tensor([7, 8]),
        timestamp=torch.tensor([100, 90_000_000_000]),
        history_row=torch.tensor([[5, 2, 0, 0], [0, 0, 0, 0]]),
        context=torch.tensor([[1, 0], [3, 2]]),
        candidate_row=torch.tensor([[2, 3, 0], [4, 5, 6]]),
        candidate_mask=torch.tensor([[True, True, False], [True, False, True]]),
        labels=torch.tensor([[[1.0], [0.0], [1.0]], [[0.0], [1.0], [1.0]]]),
        weight=None,
        oracle=torch.tensor([[[0.5], [0.25], [0.0]], [[0.0], [1.0], [1.0]]]) if oracle else None,
    )


LOGITS = torch.tensor([[[0.5], [-1.0], [9.0]], [[2.0], [9.0], [3.0]]])


def test_a_batch_flattens_to_its_valid_candidates() -> None:
    scored = from_batch(["click"], batch(oracle=True), LOGITS)
    assert scored.offsets.tolist() == [0, 2, 4]
    assert scored.row.tolist() == [2, 3, 4, 6]
    assert scored.labels.ravel().tolist() == [1, 0, 0, 1]
    assert scored.logits.ravel().tolist() == [0.5, -1.0, 2.0, 3.0]
    assert scored.oracle is not None
    assert scored.oracle.ravel().tolist() == [0.5, 0.25, 0.0, 1.0]
    assert scored.request_index.tolist() == [0, 0, 1, 1]
    assert scored.candidate_timestamp.tolist() == [100, 100, 90_000_000_000, 90_000_000_000]
    assert scored.labels.dtype == np.int8
    assert scored.logits.dtype == np.float32


def test_logits_may_be_of_half_precision_and_hold_a_graph() -> None:
    scored = from_batch(["click"], batch(), LOGITS.to(torch.bfloat16).requires_grad_())
    assert scored.logits.ravel().tolist() == [0.5, -1.0, 2.0, 3.0]


def test_parts_join_in_order() -> None:
    part = from_batch(["click"], batch(), LOGITS)
    whole = concat([part, empty(["click"]), part])
    assert whole.request_id.tolist() == [7, 8, 7, 8]
    assert whole.offsets.tolist() == [0, 2, 4, 6, 8]
    assert whole.row.tolist() == [2, 3, 4, 6, 2, 3, 4, 6]


def test_parts_of_unlike_datasets_do_not_join() -> None:
    with pytest.raises(DataError, match="oracle"):
        concat(
            [
                from_batch(["click"], batch(), LOGITS),
                from_batch(["click"], batch(oracle=True), LOGITS),
            ]
        )


def test_joining_nothing_is_an_error() -> None:
    with pytest.raises(DataError, match="no request was scored"):
        concat([])


def test_requests_keep_what_slices_are_made_of() -> None:
    scored = concat([from_batch(["click"], batch(), LOGITS), empty(["click"])])
    assert scored.history_length is not None
    assert scored.context is not None
    assert scored.history_length.tolist() == [2, 0]
    assert scored.context.tolist() == [[1, 0], [3, 2]]
    # 100 microseconds and 25 hours after the start of 1970.
    assert scored.day.astype(str).tolist() == ["1970-01-01", "1970-01-02"]


def test_users_are_numbered_as_they_come_and_weights_reach_the_candidates() -> None:
    scored = from_batch(["click"], batch(), LOGITS)
    assert (scored.user, scored.num_users, scored.candidate_weight) == (None, None, None)
    known = replace(scored, user_id=pa.array(["b", "a"]), weight=np.array([2.0, 0.5]))
    assert known.user is not None
    assert known.candidate_weight is not None
    assert (known.user.tolist(), known.num_users) == ([0, 1], 2)
    assert known.candidate_weight.tolist() == [2.0, 2.0, 0.5, 0.5]
    assert empty(["click"]).num_users is None
