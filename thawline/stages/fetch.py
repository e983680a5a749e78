"""From the registry to the disk: a model folder, or the vectors of one of its ID tables."""

from __future__ import annotations

import tempfile
from pathlib import Path

from thawline.config import Config
from thawline.folders import place_for, whole_folder
from thawline.model.bundle import Bundle
from thawline.model.vectors import write_table
from thawline.tracking.fetch import SCHEME, fetch_vectors, local_model, require_model
from thawline.tracking.server import require_answer


def model(config: Config, source: str, out: str | Path) -> None:
    """Fetches a model as the model folder `out`.

    Args:
        config: Names the server.
        source: A `models:/` URI.
        out: What stood there before is replaced once the model is whole.

    Raises:
        DataError: What was fetched is no whole model folder.
        TrackingError: A URI of another form, no such version or alias, the server's refusal.
    """
    out = place_for(out, folder=True)
    require_answer(config)
    with (
        tempfile.TemporaryDirectory(dir=out.parent, prefix=".fetched-") as scratch,
        whole_folder(out) as folder,
    ):
        fetched = require_model(config, source, Path(scratch)).folder
        Bundle.load(fetched)
        fetched.rename(folder)


def table(config: Config, source: str, name: str, out: str | Path) -> None:
    """Writes the vectors of a model's ID table as the Parquet file `out` (see `model.vectors`).

    Args:
        config: Names the server.
        source: A `models:/` URI, whose registered file is taken, or a model folder.
        name: `item`, or another table with a vocabulary.
        out: Appears whole or not at all.

    Raises:
        DataError: A damaged model folder, or a table that it has not.
        TrackingError: A URI of another form, no such version or alias, the server's refusal.
    """
    out = place_for(out, folder=False)
    if source.startswith(SCHEME):
        require_answer(config)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".table-") as scratch:
        found = fetch_vectors(config, source, name, Path(scratch))
        if found is None:
            found = Path(scratch) / "table.parquet"
            folder = local_model(config, source, Path(scratch) / "model")
            write_table(Bundle.load(folder), name, found)
        found.rename(out)
