"""What a new dataset extends: the catalog and the vocabularies of a dataset or a model folder."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from thawline.data.manifest import Catalog, Dataset
from thawline.errors import DataError

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Previous:
    """A catalog to extend, and the vocabularies that go with it."""

    path: Path
    """Its `catalog.parquet`."""
    catalog: Catalog
    context: dict[str, list[str]]
    version: str
    """A hash of both."""


def read_previous(folder: str | Path) -> Previous:
    """Reads what `windows.previous` names.

    Raises:
        DataError: Neither a dataset nor a model folder, one of another schema version, or a damaged
            one.
    """
    root = Path(folder)
    if (root / "manifest.json").exists():
        dataset = Dataset.open(root)
        catalog, context = dataset.catalog, dataset.manifest.context
    elif (root / "model.json").exists():
        catalog, context = Catalog.read(root / "catalog.parquet"), _context_of(root / "model.json")
    else:
        raise DataError(
            f"windows.previous: {root} holds neither a manifest.json nor a model.json",
            "name a dataset or model folder, or drop windows.previous to number the items anew",
        )
    path = root / "catalog.parquet"
    digest = hashlib.sha256(json.dumps(context, sort_keys=True).encode())
    with path.open("rb") as stream:
        while block := stream.read(CHUNK_BYTES):
            digest.update(block)
    return Previous(path, catalog, context, digest.hexdigest())


def _context_of(path: Path) -> dict[str, list[str]]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["context"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}", "point to a model folder") from error
