"""What `thawline finetune` prints when it has trained."""

import io

from rich.console import Console
from rich.table import Table

from thawline import terminal
from thawline.config import parse_config

SETTINGS = parse_config("simulate: {}", ["finetune.epochs=2"])


def entry(epoch, share, drift, holdouts=("next", "in_window")):
    figures = {"click": {"auc": 0.7123}, "save": {"auc": None}}
    tree = {"pooled": figures, "tiers": dict.fromkeys(("head", "torso", "tail", "cold"), figures)}
    return {
        "epoch": epoch,
        "trained": {"item": share},
        "losses": {"total": 0.65},
        "drift": {"item": drift, "user": {"head": 9.0}},
        "metrics": dict.fromkeys(holdouts, tree),
    }


def printed(epochs):
    """The lines of the table in a terminal of 80 columns, as lists of words."""
    table = terminal.epoch_table(SETTINGS, epochs)
    assert isinstance(table, Table)
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    return [line.split() for line in text.splitlines()]


FROZEN = dict.fromkeys(("head", "torso", "tail", "cold"), 0.0)
MOVED = {"head": 0.5, "torso": 0.125, "tail": 1.0, "cold": 0.0}


def test_the_drift_of_the_item_rows_stands_beneath_the_aucs_of_their_tier():
    lines = printed([entry(0, 0.0, FROZEN), entry(1, 1.0, MOVED)])

    assert ["1", "0%", "next", "click", "0.6500", *["71.23"] * 5] in lines
    assert ["2", "100%", "drift", "0.6500", "50.0", "12.5", "100.0", "0.0"] in lines
    assert sum("drift" in line[:3] for line in lines) == 1
    assert "drift of item rows (% of first norm)" in " ".join([*lines[0], *lines[1]])


def test_a_table_that_never_moved_has_no_line_of_drift():
    lines = printed([entry(0, 0.0, FROZEN)])

    assert not any("drift" in line for line in lines)


def test_drift_alone_is_printed_where_epochs_are_not_scored():
    lines = printed([entry(0, 1.0, MOVED | {"torso": 0.5}, holdouts=())])

    assert ["1", "100%", "drift", "0.6500", "50.0", "50.0", "100.0", "0.0"] in lines


def test_what_the_repair_of_cold_rows_came_to_stands_beneath_the_last_epoch():
    last = entry(0, 1.0, MOVED, holdouts=("next",))
    lines = printed([last | {"repaired": entry(0, 1.0, {})["metrics"]}])

    named = [line[0] for line in lines if "click" in line]
    assert named == ["1", "repair", "repair"]
    assert ["repair", "100%", "in_window", "click", "0.6500", *["71.23"] * 5] in lines


def test_the_tiers_that_a_table_does_not_have_are_dashes():
    lines = printed([entry(0, 1.0, {"head": 0.25})])

    assert [*("1", "100%", "drift", "0.6500", "25.0"), *["\N{EN DASH}"] * 3] in lines
