import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thawline.errors import DataError
from thawline.evaluation.holdouts import score_holdout
from thawline.evaluation.users import read_user_ids


def of_files(dataset, split):
    """(request, user) of a hold-out in the order of its files."""
    pairs = []
    for path in dataset.request_files(split):
        table = pq.read_table(path)
        for request, user, held in zip(
            *(table[name].to_pylist() for name in ("request_id", "user_id", "held_out")),
            strict=True,
        ):
            if held == (split == "in_window"):
                pairs.append((request, user))
    return pairs


def constant(batch):
    return batch.labels * 0


@pytest.mark.parametrize("split", ["next", "in_window"])
@pytest.mark.parametrize("limit", [None, 7])
def test_a_scored_hold_out_knows_who_asked(tiny_config, tiny_dataset, split, limit):
    scored = score_holdout(tiny_config, tiny_dataset, split, constant, limit=limit, users=True)
    expected = dict(of_files(tiny_dataset, split))
    assert scored.num_requests == (limit or len(expected))
    assert scored.user_id.to_pylist() == [expected[key] for key in scored.request_id.tolist()]
    assert scored.num_users == len(set(scored.user_id.to_pylist()))


def test_users_are_found_in_any_order(tiny_dataset):
    pairs = of_files(tiny_dataset, "next")[::-1]
    found = read_user_ids(tiny_dataset, "next", np.array([request for request, _ in pairs]))
    assert found.to_pylist() == [user for _, user in pairs]


def test_a_request_of_another_dataset_is_named(tiny_dataset):
    with pytest.raises(DataError, match=r"holds no request -5 in next \(1 of 1"):
        read_user_ids(tiny_dataset, "next", np.array([-5]))
    nothing = read_user_ids(tiny_dataset, "next", np.empty(0, np.int64))
    assert (len(nothing), isinstance(nothing, pa.Array)) == (0, True)
