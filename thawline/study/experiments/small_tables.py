"""Small tables: up to how many rows a matrix product sums gradients faster than a scatter, here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from markupsafe import Markup
from matplotlib.ticker import FuncFormatter, MaxNLocator

from thawline.config import Config
from thawline.evaluation import formatting
from thawline.evaluation.drawing import INK, MUTED, SLICES, drawing, svg
from thawline.evaluation.epoch_plots import label_ends
from thawline.study.experiments import parts
from thawline.study.experiments.base import Experiment, Section, Tree

IDS = (10_000, 100_000)
"""Lookups a step that are timed beside the config's own."""
ROUNDS = 7
_COLORS = (INK, *(SLICES[name] for name in ("head", "tail", "torso", "cold")))


def ids_of(config: Config) -> list[int]:
    """Lookups a step: the config's of a context column and of the history's actions, and `IDS`."""
    batch = config.finetune.batch_size
    return sorted({batch, batch * config.windows.history_length, *IDS})


def measure(config: Config, *, rows: Sequence[int] | None = None) -> dict[str, Any]:
    """Times both backwards on the config's device, with its threads and the width of its model.

    Args:
        config: Its `runtime`, `model.dim`, `finetune.batch_size` and `windows.history_length` are
            used.
        rows: Of the table; None: `crossover.ROWS`.

    Returns:
        `{"device", "torch", "threads", "dim", "own": [ids of the config], "timed": [{"ids", "rows",
        "seconds": {way: s}, "error": {way: e}}]}`.
    """
    # Pages of experiments are made without loading what trains.
    import torch

    from thawline.tables.choices import device_name
    from thawline.tables.crossover import ROWS, sweep

    cuda = config.runtime.device != "cpu" and torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    if config.runtime.threads:
        torch.set_num_threads(config.runtime.threads)
    batch, dim = config.finetune.batch_size, config.model.dim
    return {
        "device": device_name(torch.device(device)),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "dim": dim,
        "own": [batch, batch * config.windows.history_length],
        "timed": [
            {
                "ids": each.ids,
                "rows": each.rows,
                "seconds": dict(each.seconds),
                "error": dict(each.error),
            }
            for each in sweep(
                ids_of(config), rows=rows or ROWS, dim=dim, device=device, rounds=ROUNDS
            )
        ],
    }


def _page(facts: Tree, table: pa.Table, rows: Sequence[Tree]) -> list[Section]:
    from thawline.tables.crossover import crossover, last_won

    measured = facts["measured"]
    by_ids: dict[int, list[Tree]] = {}
    for each in measured["timed"]:
        by_ids.setdefault(each["ids"], []).append(each)
    words, lines, series = [], [], {}
    own = dict(zip(measured["own"], ("a context column's", "the history's actions'"), strict=True))
    for count, timed in by_ids.items():
        ratios = {each["rows"]: _ratio(each) for each in timed}
        last, crossed = last_won(ratios), crossover(ratios)
        of = f"{count:,} lookups a step" + (f" ({own[count]} here)" if count in own else "")
        if last is None:
            words.append(f"{of}: the scatter is quicker from {min(ratios)} rows on.")
        elif crossed is None:
            words.append(f"{of}: the one-hot product is quicker up to {last} rows at least.")
        else:
            words.append(
                f"{of}: the one-hot product is quicker up to {last} rows; both take equally long "
                f"at about {crossed:.0f}."
            )
        series[f"{count:,}"] = ratios
        lines += [
            [
                f"{count:,} lookups, {each['rows']} rows",
                *(f"{1e3 * each['seconds'][way]:.3f}" for way in ("one-hot", "scatter")),
                formatting.figure(_ratio(each), 2),
                *(f"{each['error'][way]:.1e}" for way in ("one-hot", "scatter")),
            ]
            for each in timed
        ]
    words.append(
        f"Measured on {measured['device']} with {_threads(measured['threads'])}, torch "
        f"{measured['torch']}, width {measured['dim']}, float32; the shortest of several runs that "
        "took turns. With model.small_table_backward=auto training measures its own shapes once "
        "and takes the quicker way. Errors are the largest distance from the sum in float64, over "
        "its largest entry."
    )
    columns = ["", "one-hot, ms", "scatter, ms", "one-hot / scatter", "one-hot error", "scatter"]
    plot = parts.figure(
        "Time of the one-hot product over the scatter's",
        _plot(series),
        "By rows of the table, a line a number of lookups; below 1 the product is quicker.",
    )
    return [Section("Where the backward changes hands", words, plot + parts.table(columns, lines))]


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _ratio(timed: Tree) -> float:
    return float(timed["seconds"]["one-hot"] / timed["seconds"]["scatter"])


def _plot(series: Mapping[str, Mapping[int, float]]) -> Markup:
    """Both axes by powers of two."""
    rows = sorted({each for ratios in series.values() for each in ratios})
    with drawing(3.0) as drawn:
        axes = drawn.subplots()
        axes.axhline(0.0, color=MUTED, linewidth=1)
        ends = []
        for place, (name, ratios) in enumerate(series.items()):
            color = _COLORS[place % len(_COLORS)]
            heights = [math.log2(ratio) for ratio in ratios.values()]
            axes.plot(
                [math.log2(each) for each in ratios],
                heights,
                color=color,
                marker="o",
                clip_on=False,
            )
            ends.append((heights[-1], name, color))
        parts.finish(axes, "rows of the table", "one-hot / scatter")
        axes.set_xticks([math.log2(each) for each in rows], [str(each) for each in rows])
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda power, _: f"{2.0**power:g}"))
        label_ends(axes, math.log2(rows[-1]), ends)
        return svg(drawn, "time of the one-hot product over the scatter's, by rows")


SMALL_TABLES = Experiment(
    name="small-tables",
    title="The backward of small tables",
    question="A table of tens of rows gets thousands of gradients a step. Up to how many rows is "
    "their sum quicker as a product of matrices, one_hot(ids)\N{MODIFIER LETTER CAPITAL T}"
    " @ grad, than as a scatter, on this device? Nothing is trained.",
    reported=(
        "The article replaced the scatter by the product for its small tables, and found equal "
        "bits.",
        "The reproduction, on a T4: the product is 1.8 to 2.8 times as fast with 10 rows and loses "
        "from about 30 to 60 rows on; its bits differ in float32, and it is closer to the sum in "
        "float64.",
    ),
    measure=measure,
    page=_page,
)
