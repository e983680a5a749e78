"""A trained model as a folder, and back: safetensors, Parquet and JSON, never pickle.

```
model.json              what it is (Meta)
ranker.safetensors      the network
tables/item.safetensors the item rows; beside them, those of the other ID tables
content.safetensors     the items' content vectors, where there is a content tower
catalog.parquet         item ids, by row
ids/, item_ids.safetensors    the rows of ids in the other tables (`ids`)
```
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from thawline import __version__
from thawline.config import Config, IdTableSettings, Model
from thawline.data.batches import Batch, padded_width
from thawline.data.content import content_facts
from thawline.data.manifest import Catalog, Dataset
from thawline.errors import DataError
from thawline.model.files import save_tensors
from thawline.model.ids import ModelIds
from thawline.model.ranker import Ranker
from thawline.tables.carry import carry_rows

SCHEMA_VERSION = 2


class Meta(BaseModel):
    """`model.json`."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = SCHEMA_VERSION
    thawline_version: str = __version__
    data_version: str
    recipe: str
    epochs: int
    seed: int
    actions: list[str]
    context: dict[str, list[str]]
    history_length: int
    num_rows: int
    model: Model
    tables: dict[str, IdTableSettings] = {}
    """The ID tables beside the item table."""
    content_dim: int = 0
    """Width of the content vectors; 0 without a content tower."""
    cross_fit: bool = False
    """Whether the item rows are the mean of two cross-fitted copies."""
    export: str = "last"
    """Which epoch was to be taken (`finetune.export`)."""
    exported_epoch: int | None = None
    """After how many epochs the model was taken."""
    cold_rows: str = "keep"
    """How the item rows of tier cold were moved after training (`finetune.cold_rows`)."""
    staleness: int | None = None
    """Updates that a lookup missed in training; None in models of earlier versions."""
    accumulation: str = ""
    """How micro-batches were added up, in words; empty in models of earlier versions."""

    @classmethod
    def of(cls, dataset: Dataset, config: Config) -> Meta:
        """What a model trained on `dataset` by `config` will say of itself."""
        manifest = dataset.manifest
        wants_content = config.model.content_tower is not None
        return cls(
            data_version=manifest.data_version,
            recipe=config.finetune.recipe,
            epochs=config.finetune.epochs,
            seed=config.seed,
            actions=manifest.actions,
            context=manifest.context,
            history_length=manifest.history_length,
            num_rows=dataset.catalog.num_rows,
            model=config.model,
            tables=config.tables.others,
            content_dim=content_facts(dataset).dim if wants_content else 0,
            cross_fit=config.finetune.cross_fit,
            export=config.finetune.export,
            exported_epoch=config.finetune.epochs,
            cold_rows=config.finetune.cold_rows,
            staleness=config.finetune.staleness,
            accumulation=config.finetune.accumulation.words,
        )

    def make_ranker(self) -> Ranker:
        """A ranker of this shape with fresh parameters from torch's global generator."""
        return Ranker(
            self.model,
            actions=len(self.actions),
            context_sizes={name: len(values) + 1 for name, values in self.context.items()},
            history_length=padded_width(self.history_length),
            tables=self.tables,
            content_dim=self.content_dim,
        )


@dataclass(frozen=True)
class Bundle:
    """A model ready to score."""

    meta: Meta
    ranker: Ranker
    weights: Mapping[str, Tensor]
    """Rows `[N, d]` of each ID table; `content` holds the items' content vectors."""
    catalog: Catalog
    ids: ModelIds = field(default_factory=ModelIds)
    """The rows of ids in the tables beside `item`."""

    @classmethod
    def load(cls, folder: str | Path) -> Bundle:
        """Reads a model folder.

        Raises:
            DataError: A missing, damaged or unfitting file; the message names it.
        """
        folder = Path(folder)
        meta = read_meta(folder / "model.json")
        ranker = meta.make_ranker()
        weights = load_tensors(folder / "ranker.safetensors")
        try:
            ranker.load_state_dict(weights)
        except RuntimeError as error:
            raise DataError(
                f"{folder / 'ranker.safetensors'} does not fit model.json: {error}",
                "use the files of one model folder together",
            ) from error
        ranker.eval()
        shapes = {"item": (meta.num_rows, meta.model.dim)}
        shapes |= {name: (table.rows, table.dim) for name, table in meta.tables.items()}
        table_weights = {
            name: load_table(folder / "tables" / f"{name}.safetensors", *shape)
            for name, shape in shapes.items()
        }
        if meta.content_dim:
            table_weights["content"] = load_table(
                folder / "content.safetensors", meta.num_rows, meta.content_dim
            )
        catalog = Catalog.read(folder / "catalog.parquet")
        ids = ModelIds.read(folder, meta.tables, meta.num_rows)
        return cls(meta, ranker, table_weights, catalog, ids)

    def to(self, device: str) -> Bundle:
        """The same model on a device; the network is moved, not copied."""
        weights = {name: weight.to(device) for name, weight in self.weights.items()}
        return replace(self, ranker=self.ranker.to(device), weights=weights)

    @torch.inference_mode()
    def score(self, batch: Batch) -> Tensor:
        """Logits `[B, C, A]`; what stands at masked candidates means nothing."""
        batch = batch.to(self.weights["item"].device)
        return self.ranker(batch, self.read(batch))

    def read(self, batch: Batch) -> dict[str, Tensor]:
        """The rows that the ranker wants for a batch on the model's device, `[n, d]` by table."""
        return {
            name: self.weights[name].index_select(0, rows).float()
            for name, rows in self.ranker.rows(batch).items()
        }


def save_bundle(folder: Path, bundle: Bundle, catalog: Path) -> None:
    """Writes a model folder that `Bundle.load` reads; `catalog` is the Parquet file to copy."""
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    (folder / "model.json").write_text(bundle.meta.model_dump_json(indent=2), encoding="utf-8")
    ranker = bundle.ranker.state_dict()
    weights = {name: tensor.contiguous().cpu() for name, tensor in ranker.items()}
    save_tensors(weights, folder / "ranker.safetensors")
    for name, weight in bundle.weights.items():
        place = folder if name == "content" else folder / "tables"
        save_table(place / f"{name}.safetensors", weight)
    bundle.ids.write(folder)
    shutil.copyfile(catalog, folder / "catalog.parquet")


def save_table(path: Path, weight: Tensor) -> None:
    """Writes table rows `[N, d]`."""
    save_tensors({"weight": weight.detach().contiguous().cpu()}, path)


def load_table(path: Path, num_rows: int, dim: int) -> Tensor:
    """Reads table rows `[num_rows, dim]`, float32.

    Raises:
        DataError: A missing or damaged file, another shape, a row that is not finite.
    """
    tensors = load_tensors(path)
    weight = tensors.get("weight")
    if weight is None or weight.shape != (num_rows, dim):
        found = "no tensor `weight`" if weight is None else f"shape {list(weight.shape)}"
        raise DataError(
            f"{path} has {found}; [{num_rows}, {dim}] is needed",
            "pretrain on this dataset, with this model.dim",
        )
    bad = (~torch.isfinite(weight)).any(1).nonzero()
    if len(bad):
        raise DataError(
            f"{path}: row {int(bad[0])} (and {len(bad) - 1} more) holds NaN or inf",
            "lower pretrain.table_learning_rate and pretrain again",
        )
    return weight.float()


def load_rows(folder: Path, catalog: Catalog, dim: int, *, seed: int) -> Tensor:
    """Reads the item rows of a table or model folder for a dataset's catalog.

    Where the folder's own catalog is another one, each item keeps its row, and new items start at
    random.

    Returns:
        `[catalog.num_rows, dim]`, float32.

    Raises:
        DataError: A missing, damaged or unfitting file.
    """
    path = folder / "item.safetensors"
    if not path.exists() and (folder / "tables").exists():
        path = folder / "tables" / "item.safetensors"
    if not path.exists():
        raise DataError(
            f"{folder} holds no item rows (no {path.name})",
            "name a table folder, which `thawline pretrain` makes, or a model folder",
        )
    if not (folder / "catalog.parquet").exists():
        return load_table(path, catalog.num_rows, dim)
    old = Catalog.read(folder / "catalog.parquet")
    weight = load_table(path, old.num_rows, dim)
    if old.num_rows == catalog.num_rows and catalog.extends(old):
        return weight
    return carry_rows(weight, old, catalog, seed=seed)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Reads a safetensors file.

    Raises:
        DataError: A missing or damaged file; the message names it.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read: {error}", "train the model again") from error


def read_meta(path: Path) -> Meta:
    """Reads a `model.json`.

    Raises:
        DataError: A missing or damaged file, or one of another schema version.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if tree.get("schema_version") != SCHEMA_VERSION:
            raise DataError(
                f"{path} has schema version {tree.get('schema_version')}; "
                f"this Thawline reads {SCHEMA_VERSION}",
                "train the model again, or use the Thawline that made it",
            )
        return Meta.model_validate(tree)
    except (OSError, ValueError, ValidationError) as error:
        raise DataError(f"{path} cannot be read: {error}", "point to a model folder") from error
