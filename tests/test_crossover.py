"""Where a small table's backward changes hands: what is timed, and what is said of the times."""

import json

import pyarrow as pa
import pytest
import torch
from experiment_studies import rows_of

from thawline.config import parse_config
from thawline.study.experiments.small_tables import SMALL_TABLES, ids_of, measure
from thawline.tables.crossover import compete, crossover, last_won, sweep


def test_both_ways_are_timed_for_every_shape_and_agree_with_float64():
    found = list(sweep([50, 500], rows=(4, 16), dim=8, rounds=1))
    assert [(each.ids, each.rows) for each in found] == [(50, 4), (50, 16), (500, 4), (500, 16)]
    for each in found:
        assert set(each.seconds) == set(each.error) == {"one-hot", "scatter"}
        assert each.ratio == each.seconds["one-hot"] / each.seconds["scatter"] > 0
        assert all(0 <= error < 1e-5 for error in each.error.values())


def test_further_contestants_get_the_same_gradients():
    seen = []

    def more(grad, ids, rows):
        seen.append((tuple(grad.shape), grad.dtype, int(ids.max()) < rows))
        return {"third": lambda: None}

    (timed,) = sweep([30], rows=(4,), dim=8, dtype=torch.bfloat16, rounds=1, more=more)
    assert list(timed.seconds) == ["one-hot", "scatter", "third"]
    assert seen == [((30, 8), torch.bfloat16, True)]


def test_contestants_take_turns_after_two_rounds_that_do_not_count():
    order = []
    steps = {name: lambda name=name: order.append(name) for name in "ab"}
    found = compete(steps, "cpu", 3, len)
    assert order == ["a", "b"] * 5
    assert found == {"a": 3, "b": 3}


@pytest.mark.parametrize(
    ("ratios", "last", "crossed"),
    [
        # Halfway between the logarithms of 1/2 and 2: halfway between those of 16 and 64.
        ({4: 0.25, 16: 0.5, 64: 2.0}, 16, 32.0),
        ({4: 0.5, 16: 1.0, 64: 2.0}, 4, 16.0),
        ({4: 1.5, 16: 2.0}, None, None),
        ({4: 0.5, 16: 0.7}, 16, None),
    ],
)
def test_the_crossover_lies_where_both_take_equally_long(ratios, last, crossed):
    assert last_won(ratios) == last
    found = crossover(ratios)
    assert found is None if crossed is None else found == pytest.approx(crossed)


def test_the_experiment_times_the_lookups_of_the_config():
    config = parse_config(
        "simulate: {}",
        ["finetune.batch_size=20", "windows.history_length=4", "model.dim=8", "runtime.device=cpu"],
    )
    assert ids_of(config) == [20, 80, 10_000, 100_000]
    measured = measure(config, rows=(4, 8))
    assert json.loads(json.dumps(measured)) == measured
    assert measured["own"] == [20, 80]
    assert measured["dim"] == 8
    assert len(measured["timed"]) == 4 * 2


def test_the_page_says_up_to_how_many_rows_the_product_wins():
    def timed(ids, rows, one_hot, scatter):
        seconds = {"one-hot": one_hot, "scatter": scatter}
        return {"ids": ids, "rows": rows, "seconds": seconds, "error": dict.fromkeys(seconds, 1e-7)}

    measured = {
        "device": "a processor",
        "torch": "2",
        "threads": 1,
        "dim": 8,
        "own": [20, 80],
        "timed": [
            timed(20, 4, 0.003, 0.001),
            timed(20, 16, 0.004, 0.001),
            timed(80, 4, 0.001, 0.002),
            timed(80, 16, 0.004, 0.002),
            timed(90, 4, 0.001, 0.002),
            timed(90, 16, 0.001, 0.002),
        ],
    }
    (section,) = SMALL_TABLES.page({"measured": measured}, pa.table({}), [])
    assert section.words[:3] == [
        "20 lookups a step (a context column's here): the scatter is quicker from 4 rows on.",
        "80 lookups a step (the history's actions' here): the one-hot product is quicker up to 4 "
        "rows; both take equally long at about 8.",
        "90 lookups a step: the one-hot product is quicker up to 16 rows at least.",
    ]
    assert "with 1 thread," in section.words[3]
    assert rows_of(section)["80 lookups, 16 rows"][:3] == ["4.000", "2.000", "2.00"]
    assert "<svg" in section.html
