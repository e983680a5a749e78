"""The tables that `thawline evaluate` prints."""

import io

from rich.console import Console

from thawline import terminal

DASH = "\N{EN DASH}"

FIGURES = {
    "user_auc": 0.69,
    "normalized_entropy": 0.95,
    "calibration": 1.0312,
    "ece": 0.012,
    "hit@3": 0.6,
    "ndcg@3": 0.45,
    "mrr": 0.5,
}


def printed(metrics):
    """The lines in a terminal of 80 columns, as lists of words."""
    console = Console(file=io.StringIO(), width=80)
    console.print(terminal.figures_table(metrics))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    return [line.split() for line in lines]


def test_every_figure_of_a_hold_out_stands_in_one_line_with_the_interval_of_its_auc():
    ends = {"pooled": {"save": {"auc": [0.70, 0.725]}}, "tiers": {}}
    lines = printed({"in_window": {"pooled": {"save": FIGURES}, "intervals": ends}})

    expected = ["in_window", "save", f"70.0{DASH}72.5", "69.0"]
    assert [*expected, "0.950", "1.031", "0.012", "60.0", "45.0", "50.0"] in lines


def test_figures_that_are_undefined_or_were_not_made_are_dashes():
    undefined = dict.fromkeys(FIGURES)
    lines = printed({"next": {"pooled": {"save": undefined, "click": {}}}})

    assert ["next", "save", *[DASH] * 7] in lines
    assert ["next", "click", *[DASH] * 7] in lines
