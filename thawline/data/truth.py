"""The true probabilities of a simulated log, joined to its events."""

from __future__ import annotations

import ibis.expr.types as ir
from ibis.backends.duckdb import Backend

from thawline.data.engine import hash63, keep
from thawline.data.sources import find_files, open_parquet, reading
from thawline.errors import ConfigError, DataError


def join_truth(
    engine: Backend, events: ir.Table, path: str, actions: list[str], *, hashed_requests: bool
) -> ir.Table:
    """Adds `oracle_<action>` (float32), null where the truth has no such candidate.

    Args:
        engine: Reads and keeps the file.
        events: With request_id and item_id.
        path: `events.truth`: Parquet with request_id, item_id and p_<action>.
        actions: Names of the actions.
        hashed_requests: The log's request ids are text, which the events hold hashed.

    Raises:
        ConfigError: The log has no request ids.
        DataError: A file that cannot be read or lacks a column.
    """
    if "request_id" not in events.columns:
        raise ConfigError(
            "events.truth is set, but events.columns.request_id is not",
            "name the request id's column, or drop events.truth",
        )
    files = find_files(path, "events.truth")
    columns = ["request_id", "item_id", *(f"p_{name}" for name in actions)]
    needed = {f"events.truth, column {name}": name for name in columns}
    truth = open_parquet(engine, files, needed)
    request_id = (
        hash63(truth.request_id.cast("string"))
        if hashed_requests
        else truth.request_id.cast("int64")
    )
    truth = truth.select(
        request_id=request_id,
        item_id=truth.item_id.cast(events.item_id.type()),
        **{f"oracle_{name}": truth[f"p_{name}"].cast("float32") for name in actions},
    )
    with reading(files, "parquet", needed):
        truth = keep(engine, "truth", truth)
    return events.left_join(truth, ["request_id", "item_id"]).drop(
        "request_id_right", "item_id_right"
    )


def require_complete(requests: ir.Table, actions: list[str], path: str) -> None:
    """Checks that each candidate has its true probabilities.

    Raises:
        DataError: Some are missing.
    """
    for name in actions:
        values = requests.select(value=requests[f"oracle_{name}"].unnest())
        missing = values.filter(values.value.isnull()).count().to_pyarrow().as_py()
        if missing:
            raise DataError(
                f"{path} (events.truth) has no p_{name} for {missing} of the requests' candidates",
                "take the truth of the same log, or drop events.truth",
            )
