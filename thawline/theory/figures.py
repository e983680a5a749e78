"""The closed forms as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from thawline.theory.capacity import Machine, Plan
from thawline.theory.displacement import dense_adam, lazy_adam, row_wise_adagrad
from thawline.theory.popularity import Popularity
from thawline.theory.stability import largest_stable_step
from thawline.theory.staleness import effective_rows, effective_rows_limit, stale_share
from thawline.theory.timing import written_then_replayed

STARTS = 5
"""Starts of a window in the table of the timing law, evenly spaced."""


def popularity_table(popularity: Popularity, alpha: float | None = None) -> Table:
    """What decides about staleness in a table: its rows, N_eff and the hottest row.

    Args:
        popularity: How often rows are read.
        alpha: The Zipf exponent, where it is a Zipf law: adds the limit of N_eff.
    """
    lines = [
        ("rows", f"{popularity.rows:,}"),
        ("effective rows", f"{effective_rows(popularity):,.1f}"),
    ]
    if alpha is not None:
        lines.append(("effective rows, limit", f"{effective_rows_limit(alpha):,.1f}"))
    lines.append(("lookups of the hottest row", _share(popularity.hottest)))
    return _table("Popularity", ("", ""), lines)


def staleness_table(popularity: Popularity, lookups: int, staleness: Sequence[int]) -> Table:
    """Stale lookups and the stability bound, one line a number of updates that a lookup misses.

    Args:
        popularity: How often rows are read.
        lookups: Lookups a batch.
        staleness: Updates between a lookup's read and the newest write.

    Raises:
        ConfigError: No lookups, or a negative staleness.
    """
    lines = []
    for late in staleness:
        bound = largest_stable_step(late)
        stale = stale_share(popularity, lookups, late)
        lines.append(
            (str(late), _share(stale), f"{bound:.3g}", f"{bound / popularity.hottest:.3g}")
        )
    return _table(
        f"Stale lookups, {lookups:,} a batch, and the largest stable step of plain SGD",
        ("updates late", "stale lookups", "step of a row", "rate x curvature, hottest row"),
        lines,
    )


def displacement_table() -> Table:
    """Movement of a row after a single gradient, by optimizer."""
    return _table(
        "Movement of a row after one gradient, in learning rates",
        ("optimizer", "movement", "counted over"),
        [
            ("dense Adam", f"{dense_adam():.2f}", "that step and all idle ones after it"),
            ("lazy Adam", f"{lazy_adam():.2f}", "that step"),
            ("row-wise Adagrad", f"{row_wise_adagrad():.2f}", "that step, the row's first"),
        ],
    )


def timing_table(epochs: int) -> Table:
    """Examples written and then replayed, by the start of the window in which a table trains.

    Raises:
        ConfigError: No epoch.
    """
    last = max(epochs - 1, 0)
    starts = [last * step / (STARTS - 1) for step in range(STARTS)] if last else [0.0]
    return _table(
        f"Examples written into the table and then replayed, {_epochs(epochs)}",
        ("thaw at epoch", "trains for one epoch", "trains to the end"),
        [
            (
                f"{start:g}",
                _share(written_then_replayed([(start, start + 1)], epochs)),
                _share(written_then_replayed([(start, epochs)], epochs)),
            )
            for start in starts
        ],
    )


def plan_tables(plan: Plan, machine: Machine, staleness: int, steps: int | None) -> list[Table]:
    """A plan: memory, bytes, times, and what an epoch costs.

    Args:
        plan: Of one step.
        machine: What it was made for.
        staleness: Updates that a lookup misses with prefetch.
        steps: Steps of an epoch; None: it is not known.
    """
    memory, traffic, times = plan.memory, plan.traffic, plan.times
    tables = [
        _table(
            "Memory of a GPU, GB",
            ("", ""),
            [
                ("rows", _gb(memory.weights)),
                ("optimizer state of the rows", _gb(memory.state)),
                ("rows looked up, gradients", _gb(memory.buffers)),
                ("activations", _gb(memory.activations)),
                ("network, gradients, Adam", _gb(memory.network)),
                ("all", _gb(memory.total)),
            ],
        ),
        _table(
            f"Sent by a GPU in a step, {plan.distinct:,.0f} distinct rows",
            ("", "MB"),
            [
                ("all-to-all of ids", f"{traffic.ids / 1e6:,.2f}"),
                ("all-to-all of rows", f"{traffic.rows / 1e6:,.2f}"),
                ("all-to-all of gradients, if the table trains", f"{traffic.gradients / 1e6:,.2f}"),
                ("all-reduce of the network", f"{traffic.network / 1e6:,.2f}"),
            ],
        ),
        _table(
            f"A step, ms ({machine.utilisation:.0%} of {machine.flops / 1e12:,.0f} TFLOP/s, "
            f"{machine.network_share:.0%} of {machine.bandwidth / 1e9:,.4g} GB/s)",
            ("", ""),
            [
                ("lookup", _ms(times.lookup)),
                ("forward", _ms(times.forward)),
                ("backward", _ms(times.backward)),
                ("network's optimizer, all-reduce", _ms(times.optimizer)),
                ("update of the rows, if they train", _ms(times.update)),
                ("exposed lookup, synchronous", _ms(times.exposed(0))),
                (f"exposed lookup, {staleness} updates late", _ms(times.exposed(staleness))),
            ],
        ),
        _table(
            "Steps and epochs",
            ("the table", "step, ms", "synchronous", "saved", "epoch, hours", "GPU-hours"),
            [
                (
                    name,
                    _ms(late := times.step(staleness, trains=trains)),
                    _ms(prompt := times.step(0, trains=trains)),
                    f"{1 - late / prompt:.1%}",
                    *_hours(steps, late, machine.gpus),
                )
                for name, trains in (("frozen", False), ("thawed", True))
            ],
        ),
        _table(
            f"Staleness, {staleness} updates late",
            ("", ""),
            [
                ("stale lookups", _share(plan.stale)),
                ("largest stable rate x curvature, plain SGD", f"{plan.largest_rate:.3g}"),
            ],
        ),
    ]
    return tables


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.3f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f}"


def _hours(steps: int | None, seconds: float, gpus: int) -> tuple[str, str]:
    if steps is None:
        return "unknown", "unknown"
    return f"{steps * seconds / 3600:,.4g}", f"{steps * seconds * gpus / 3600:,.4g}"


def _table(title: str, headings: Iterable[str], lines: Iterable[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=any(headings))
    for heading in headings:
        table.add_column(heading)
    for line in lines:
        table.add_row(*line)
    return table


def _share(value: float) -> str:
    return f"{100 * value:.2f} %" if value >= 1e-4 or value == 0 else f"{100 * value:.2g} %"


def _epochs(count: int) -> str:
    return f"{count} epoch" + ("s" if count != 1 else "")
