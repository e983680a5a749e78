"""Logs of which no dataset can be made, and what is said of them."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from window_reference import DAY, START, config_for, random_log, write_log

from thawline.data.windows import build_dataset
from thawline.errors import DataError


@pytest.mark.parametrize(
    ("windows", "named"),
    [
        ({"end": "2026-03-12"}, "the test window (2026-03-11 to 2026-03-12) has no requests"),
        ({"end": "2026-03-10"}, "the fine-tune window (2026-03-06 to 2026-03-08) has no requests"),
        (
            {"end": "2026-03-04", "finetune_days": 1},
            "the pretraining window (2026-02-27 to 2026-03-01) has no training user with two",
        ),
    ],
)
def test_an_empty_window_is_named_with_its_dates_and_the_range_of_the_log(tmp_path, windows, named):
    rows = [
        {
            "user": user,
            "item": user + day,
            "time": START + (day - 1) * DAY + user,
            "request": 100 * day + user,
            "position": 0,
            "click": True,
            "save": False,
            "device": "tv",
        }
        for day in (2, 3, 4, 9, 10)
        for user in range(20)
    ]
    config = config_for(write_log(rows, tmp_path / "log.parquet"), True, **windows)
    with pytest.raises(DataError) as error:
        build_dataset(config, tmp_path)
    assert named in str(error.value)
    assert "the log runs from 2026-03-02 to 2026-03-10" in str(error.value)
    assert "windows.end" in error.value.remedy


def test_a_context_column_of_many_values_is_refused_by_name(tmp_path):
    rows = [
        {
            "user": 1 + i % 50,
            "item": i % 9,
            "time": START + i * DAY // 1000,
            "click": True,
            "save": False,
            "device": f"{i}",
        }
        for i in range(8_000)
    ]
    config = config_for(write_log(rows, tmp_path / "log.parquet"), False)
    with pytest.raises(DataError, match=r"events\.context\.device has \d+ values"):
        build_dataset(config, tmp_path)


def test_truth_of_another_log_is_refused(tmp_path):
    path = write_log(random_log("int"), tmp_path / "log.parquet")
    truth = {"request_id": [6999], "item_id": [990], "p_click": [0.5], "p_save": [0.1]}
    pq.write_table(pa.table(truth), tmp_path / "truth.parquet")
    config = config_for(path, True)
    events = config.events.model_copy(update={"truth": str(tmp_path / "truth.parquet")})
    with pytest.raises(DataError, match=r"has no p_save for \d+ of the requests' candidates"):
        build_dataset(config.model_copy(update={"events": events}), tmp_path)


def test_a_damaged_truth_is_named(tmp_path):
    path = write_log(random_log("int"), tmp_path / "log.parquet")
    (tmp_path / "truth.parquet").write_bytes(b"PAR1 nothing PAR1")
    config = config_for(path, True)
    events = config.events.model_copy(update={"truth": str(tmp_path / "truth.parquet")})
    with pytest.raises(DataError, match=r"truth\.parquet cannot be read as Parquet"):
        build_dataset(config.model_copy(update={"events": events}), tmp_path)
