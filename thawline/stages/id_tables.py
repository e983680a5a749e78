"""The ID tables of a fine-tuning run: their first rows, their optimizers, their tiers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from thawline.config import Config, IdTableSettings, TableRows
from thawline.data.ids import IdVocabulary, table_support
from thawline.data.manifest import FIRST_ROW, PADDING_ROW, TIERS, Dataset
from thawline.errors import DataError
from thawline.model.bundle import load_rows, load_table, read_meta
from thawline.model.ids import read_known
from thawline.tables import LocalTable, RowRules, make_optimizer
from thawline.tables.carry import carry_known
from thawline.tables.memory import TableSize, require_memory
from thawline.tables.parts import PartTable
from thawline.tables.repair import Repair, repair_cold_rows, require_warm
from thawline.training.components import TrainedTable
from thawline.training.cross_fit import FOLDS, mean_of_copies
from thawline.training.drift import row_drift


@dataclass(frozen=True)
class RunTable:
    """A table of a run, and what is known of its rows."""

    table: LocalTable | PartTable
    first: Tensor
    """`[N, d]`: the rows that the run started with."""
    tier: Tensor
    """int8 `[N]`: index into `TIERS`."""
    init: float
    """Standard deviation of random rows."""
    seed: int
    copies: int = 1
    """How often each row is there; N counts all copies, which start equal."""

    def tiers(self) -> dict[str, Tensor]:
        """Bool `[N]` by tier; padding is in none."""
        masks = {name: self.tier == index for index, name in enumerate(TIERS)}
        for mask in masks.values():
            mask[list(self.table.padding_rows)] = False
        return masks

    def trained(self) -> TrainedTable:
        """The table as a trainer wants it."""
        return TrainedTable(self.table, self.tiers(), self.first, self._fresh)

    def drift(self, now: Tensor | None = None) -> dict[str, float]:
        """By tier, and of all rows as `pooled`: see `row_drift`.

        Args:
            now: All rows `[N, d]`, if they are at hand.
        """
        groups = self.tiers()
        groups["pooled"] = torch.stack(list(groups.values())).any(0)
        return row_drift(self._weight() if now is None else now, self.first, groups)

    def rows(self) -> Tensor:
        """The rows that a model keeps, `[N / copies, d]`: the mean of the copies.

        Of a sharded table the first process gets them, the others none; all have to ask.
        """
        return mean_of_copies(self._weight()) if self.copies > 1 else self._weight()

    def require_warm(self) -> None:
        """See `thawline.tables.repair.require_warm`."""
        require_warm(self.tier != TIERS.index("cold"))

    def repair(self, rows: Tensor, how: Repair) -> None:
        """Moves the cold ones of the rows that a model keeps; see `repair_cold_rows`."""
        cold = self.tier[: len(rows)] == TIERS.index("cold")
        known = torch.arange(len(rows), device=cold.device) >= FIRST_ROW
        repair_cold_rows(rows, self.first[: len(rows)], how, warm=~cold & known, cold=cold & known)

    def _weight(self) -> Tensor:
        if isinstance(self.table, LocalTable):
            return self.table.weight
        return self.table.gather().to(self.first.device)

    def _fresh(self, epoch: int) -> Tensor:
        rows, dim = len(self.first) // self.copies, self.first.shape[1]
        fresh = random_rows(rows, dim, self.init, seed=self.seed + epoch)
        return fresh.repeat(self.copies, 1).to(self.first.device)


def make_tables(config: Config, data: Dataset, source: Path, device: str) -> dict[str, RunTable]:
    """The tables of a run, all frozen.

    Args:
        config: Its `tables` section, `model.dim`, `finetune.cross_fit` and `seed` are used.
        data: What is trained on.
        source: A table folder, or a model folder, whose item rows are taken over; so are those of
            other ID tables (`first_rows`).
        device: Where the tables are to be.

    Raises:
        DataError: A missing, damaged or unfitting file.
        ConfigError: Tables larger than the memory that is free.
    """
    catalog = data.catalog
    copies = _copies(config)
    require_memory(table_sizes(config, data), device)
    support = torch.zeros(catalog.num_rows, dtype=torch.int64)
    support[FIRST_ROW:] = torch.from_numpy(catalog.support.copy())
    tier = torch.full((catalog.num_rows,), TIERS.index("cold"), dtype=torch.int8)
    tier[FIRST_ROW:] = torch.from_numpy(catalog.tier.astype("int8"))
    rows = load_rows(source, catalog, config.model.dim, seed=config.seed)
    if copies > 1:
        rows, support, tier = rows.repeat(copies, 1), support.repeat(copies), tier.repeat(copies)
    made = {
        "item": _run_table(
            "item",
            config.tables.item,
            rows,
            support,
            tier,
            config.model.dim**-0.5,
            config,
            device,
            copies,
        )
    }
    thresholds = config.windows.tiers
    for name, settings in config.tables.others.items():
        support = torch.from_numpy(table_support(data, settings))
        tier = tier_of(support, head=thresholds.head, torso=thresholds.torso)
        first = first_rows(name, settings, data, source, config.seed)
        made[name] = _run_table(name, settings, first, support, tier, settings.init, config, device)
    return made


def table_sizes(config: Config, data: Dataset) -> list[TableSize]:
    """What the tables of a run take in the process that makes them."""
    shapes: dict[str, tuple[TableRows, int, int]] = {
        "item": (config.tables.item, _copies(config) * data.catalog.num_rows, config.model.dim)
    }
    shapes |= {name: (own, own.rows, own.dim) for name, own in config.tables.others.items()}
    return [table_size(name, *shape) for name, shape in shapes.items()]


def _copies(config: Config) -> int:
    return len(FOLDS) if config.finetune.cross_fit else 1


def table_size(name: str, settings: TableRows, rows: int, dim: int) -> TableSize:
    """What a table will take; its first rows are kept, to measure drift and for the rules."""
    dtype = getattr(torch, settings.dtype)
    return TableSize(name, rows, dim, dtype, settings.optimizer, anchored=True)


def tier_of(support: Tensor, *, head: int, torso: int) -> Tensor:
    """int8 `[N]`, index into `TIERS`, from the rows' support."""
    least = torch.tensor([1, torso, head], device=support.device)
    return (TIERS.index("cold") - torch.bucketize(support, least, right=True)).to(torch.int8)


def random_rows(num_rows: int, dim: int, std: float, *, seed: int) -> Tensor:
    """Normal rows `[num_rows, dim]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, dim, generator=generator) * std


def first_rows(
    name: str, settings: IdTableSettings, data: Dataset, source: Path, seed: int
) -> Tensor:
    """The first rows of an ID table beside `item`: those of a model folder, or random ones.

    With a vocabulary, an id of both keeps its row's values wherever the row now is; with hashes,
    the table must have as many rows as before. New ids start at random.

    Returns:
        `[rows, dim]`, float32.

    Raises:
        DataError: A missing or damaged file, another width, rows that mean something else.
    """
    seed += crc32(name.encode())
    fresh = random_rows(settings.rows, settings.dim, settings.init, seed=seed)
    described = source / "model.json"
    old = read_meta(described).tables.get(name) if described.exists() else None
    if old is None:
        return fresh
    path = source / "tables" / f"{name}.safetensors"
    same = ("of", "column", "dim", "hashed", *(["rows"] if settings.hashed else []))
    for key in same:
        before, now = getattr(old, key), getattr(settings, key)
        if before != now:
            raise DataError(
                f"tables.{name}.{key} is {now}, but {path} was trained with {before}",
                f"set tables.{name}.{key}={before}, or start from a table folder",
            )
    weight = load_table(path, old.rows, old.dim)
    if settings.hashed:
        return weight
    known = IdVocabulary.read(data, settings.of, settings.column).hash[: settings.rows - 1]
    return carry_known(weight, read_known(source, name, old.rows), known, fresh)


def _run_table(
    name: str,
    settings: TableRows,
    rows: Tensor,
    support: Tensor,
    tier: Tensor,
    init: float,
    config: Config,
    device: str,
    copies: int = 1,
) -> RunTable:
    dtype = getattr(torch, settings.dtype)
    first = rows.to(device, dtype)
    support, tier = support.to(device), tier.to(device)
    padding = tuple(range(PADDING_ROW, len(first), len(first) // copies))
    table = LocalTable(
        first.clone(),
        optimizer=make_optimizer(settings.optimizer, *first.shape, device=first.device),
        rules=RowRules(
            weight_decay=settings.weight_decay,
            pull=settings.pull,
            drift_cap=settings.drift_cap,
            frequency_scaling=settings.frequency_scaling,
            anchor=first,
            support=support,
        ),
        learning_rate=settings.learning_rate,
        trainable=False,
        padding_row=padding,
        seed=config.seed,
    )
    # LocalTable has cleared its padding rows.
    first[list(padding)] = 0
    seed = config.seed + crc32(f"{name} anew".encode())
    return RunTable(table, first, tier, init, seed, copies)
