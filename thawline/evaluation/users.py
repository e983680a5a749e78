"""Who made the requests of a hold-out: ids that no batch carries, read from the dataset."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from thawline.data.manifest import Dataset, Split, read_table
from thawline.errors import DataError


def read_user_ids(dataset: Dataset, split: Split, request_id: np.ndarray) -> pa.Array:
    """The users of some requests of a hold-out.

    Args:
        dataset: What holds the requests.
        split: The hold-out.
        request_id: int64 [R], in any order; requests that share an id share its user.

    Returns:
        [R]: int64 or string, as in the log.

    Raises:
        DataError: A part file that is missing or damaged, or a request that the hold-out lacks.
    """
    ids, users = [], []
    for path in dataset.request_files(split):
        table = read_table(path, ["request_id", "user_id", "held_out"])
        table = table.filter(pc.equal(table["held_out"], split == "in_window"))
        ids.append(table["request_id"].to_numpy())
        users.append(table["user_id"].combine_chunks())
    known = np.concatenate([np.empty(0, np.int64), *ids])
    if len(known) == len(request_id) and np.array_equal(known, request_id):
        return pa.concat_arrays(users) if users else pa.array([], pa.int64())
    order = np.argsort(known, kind="stable")
    place = np.searchsorted(known, request_id, sorter=order)
    found = order[place.clip(max=max(len(known) - 1, 0))] if len(known) else place
    lost = np.ones(len(request_id), bool) if not len(known) else known[found] != request_id
    if lost.any():
        raise DataError(
            f"{dataset.root} holds no request {int(request_id[lost][0])} in {split} "
            f"({int(lost.sum())} of {len(request_id)} requests are missing)",
            "the dataset was built anew since these requests were scored: score them again",
        )
    return pa.concat_arrays(users).take(pa.array(found))
