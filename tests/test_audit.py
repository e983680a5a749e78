"""The audit: each fault planted in a small dataset is found, counted, and stops the pipeline."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import DAY, HOUR, START, write_dataset
from typer.testing import CliRunner

from thawline.cli import app
from thawline.config import Config, Negatives, parse_config
from thawline.data import item_checks, request_checks
from thawline.data.audit import audit, audited
from thawline.data.engine import open_engine
from thawline.data.findings import AuditReport, Finding
from thawline.data.manifest import Dataset
from thawline.data.negatives import NegativeSampler
from thawline.data.request_checks import Counts, count_candidates
from thawline.data.trivial import trivial_scores
from thawline.errors import ConfigError, DataError
from thawline.stages import finetune
from thawline.stages import windows as stage

TRAIN, TEST = START + DAY, START + 3 * DAY


def request(number: int, timestamp: int, **columns: Any) -> dict[str, Any]:
    """A request of user 1 on item row 2, clicked, without a history."""
    return {
        "request_id": number,
        "user_id": 1,
        "timestamp": timestamp,
        "held_out": False,
        "history_row": [],
        "history_action": [1] * len(columns.get("history_row", [])),
        "history_age": [],
        "candidate_row": [2],
        "label_click": [1] * len(columns.get("candidate_row", [2])),
    } | columns


def config_of(**sections: Any) -> Config:
    return Config.model_validate({"events": {"path": "log"}} | sections)


def by_name(report: AuditReport) -> dict[str, Finding]:
    return {finding.name: finding for finding in report.findings}


def with_engine(check: Any, dataset: Dataset, scratch: Path) -> Finding:
    config = config_of()
    with open_engine(config.windows, config.runtime, scratch) as engine:
        finding: Finding = check(engine, dataset)
        return finding


# The whole audit.


def test_sound_datasets_have_every_finding_and_no_error(
    tiny_dataset: Dataset,
    tiny_config: Config,
    tiny_clicks_dataset: Dataset,
    tiny_clicks_config: Config,
) -> None:
    for config, dataset in (
        (tiny_config, tiny_dataset),
        (tiny_clicks_config, tiny_clicks_dataset),
    ):
        report = audit(config, dataset)
        report.require()
        names = [finding.name for finding in report.findings]
        assert len(set(names)) == len(names)
        assert {"history_leakage", "holdout_leakage", "repeated_requests"} <= set(names)
        assert ("future_negatives" in names) == (not dataset.manifest.impressions)
        severities = [finding.severity for finding in report.findings]
        assert severities == sorted(severities, key=["error", "warning", "info"].index)


def test_a_catalogue_leak_stops_the_pipeline_until_each_finding_is_waived(
    tiny_clicks_dataset: Dataset, tiny_clicks_config: Config
) -> None:
    leak = tiny_clicks_config.negatives.model_copy(update={"catalogue_leak": True})
    config = tiny_clicks_config.model_copy(update={"negatives": leak})
    report = audit(config, tiny_clicks_dataset)
    errors = [finding.name for finding in report.errors]
    assert {"catalogue_leak", "future_negatives"} <= set(errors)
    with pytest.raises(DataError) as error:
        report.require()
    assert "negatives.catalogue_leak is on" in error.value.what
    assert f"audit.waive: [{', '.join(errors)}]" in error.value.remedy
    some = config.audit.model_copy(update={"waive": ["catalogue_leak"]})
    report = audit(config.model_copy(update={"audit": some}), tiny_clicks_dataset)
    assert [finding.name for finding in report.errors] == errors[1:]
    every = config.audit.model_copy(update={"waive": errors})
    report = audit(config.model_copy(update={"audit": every}), tiny_clicks_dataset)
    report.require()
    assert {f.name for f in report.findings if f.waived} == set(errors)


def test_a_waiver_of_an_unknown_finding_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"audit\.waive\.0.*'history_leakage'"):
        parse_config("{simulate: {}, audit: {waive: [hystory_leakage]}}")


def test_an_audit_is_read_back_only_for_the_same_data_and_negatives(
    tmp_path: Path, tiny_clicks_config: Config
) -> None:
    dataset = write_dataset(
        tmp_path, num_items=3, impressions=False, requests=[request(1, TRAIN), request(2, TEST)]
    )
    finding = Finding(name="history_leakage", severity="error", text="planted", remedy="none")
    config = config_of()
    planted = AuditReport(
        data_version="test",
        negatives=config.negatives.model_dump(mode="json"),
        findings=[finding],
    )
    planted.write(tmp_path / "audit.json")
    assert audited(config, dataset).errors == [finding]
    waiving = config_of(audit={"waive": ["history_leakage"]})
    assert audited(waiving, dataset).errors == []
    assert len(audited(config_of(negatives={"alpha": 0.5}), dataset).findings) > 5
    for text in (planted.model_dump_json().replace('"test"', '"other"'), "{}", "not JSON"):
        (tmp_path / "audit.json").write_text(text, encoding="utf-8")
        assert len(audited(config, dataset).findings) > 5


def test_figures_are_numbers_by_finding_and_counts_by_severity(
    tiny_dataset: Dataset, tiny_config: Config
) -> None:
    report = audit(tiny_config, tiny_dataset)
    figures = report.figures()
    assert sum(figures[name] for name in ("error", "warning", "info")) == len(report.findings)
    for finding in report.findings:
        assert figures[finding.name] == finding.figures
        assert all(np.isfinite(value) for value in finding.figures.values())


class Recorder:
    """Stands for an MLflow run: keeps what it is told."""

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}
        self.artifacts: list[str] = []

    def log_params(self, params: dict[str, Any]) -> None:
        """The params are another test's matter."""

    def log_metrics(self, metrics: dict[str, Any]) -> None:
        self.metrics |= metrics

    def log_artifact(self, path: Path) -> None:
        self.artifacts.append(path.name)


def test_the_stage_stops_at_an_error_and_leaves_dataset_and_audit_to_look_at(
    tmp_path: Path, tiny_clicks_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Recorder()
    monkeypatch.setattr(stage, "stage_run", lambda *_: contextlib.nullcontext(run))
    leak = tiny_clicks_config.negatives.model_copy(update={"catalogue_leak": True})
    config = tiny_clicks_config.model_copy(update={"negatives": leak})
    with pytest.raises(DataError, match="catalogue_leak: negatives"):
        stage.run(config, tmp_path / "dataset")
    assert run.metrics["audit"]["catalogue_leak"] == {"on": 1.0}
    assert run.artifacts == ["manifest.json", "audit.json"]
    report = AuditReport.read(tmp_path / "dataset" / "audit.json")
    assert report is not None
    assert report.data_version == Dataset.open(tmp_path / "dataset").manifest.data_version
    # Another sampler on the same dataset is looked at anew.
    stage.run(tiny_clicks_config, tmp_path / "dataset")
    assert run.metrics["audit"]["error"] == 0


def test_fine_tuning_refuses_a_sampler_that_leaks_before_it_reads_a_table(
    tmp_path: Path, tiny_clicks_dataset: Dataset, tiny_clicks_config: Config
) -> None:
    leak = tiny_clicks_config.negatives.model_copy(update={"catalogue_leak": True})
    config = tiny_clicks_config.model_copy(update={"negatives": leak})
    with pytest.raises(DataError, match="catalogue_leak: negatives"):
        finetune.run(config, tiny_clicks_dataset.root, tmp_path / "nowhere", tmp_path / "model")


def test_the_command_lists_every_finding_and_fails_at_an_error(
    tmp_path: Path, tiny_clicks_dataset: Dataset
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("events: {path: log}\n", encoding="utf-8")
    options = ["audit", "--config", str(path), "--dataset", str(tiny_clicks_dataset.root)]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    for name in ("history_leakage", "trivial_scorers", "popularity_drift"):
        assert name in result.output
    leaking = CliRunner().invoke(app, [*options, "--set", "negatives.catalogue_leak=true"])
    assert isinstance(leaking.exception, DataError)
    assert "catalogue_leak" in leaking.output


# Requests.


@pytest.mark.parametrize(
    ("history", "figure"),
    [
        ({"history_row": [2, 3], "history_age": [2.0, 0.0]}, "not_before"),
        ({"history_row": [2, 3], "history_age": [2.0, -1.0]}, "not_before"),
        ({"history_row": [2, 3], "history_age": [1.0, float("nan")]}, "not_before"),
        ({"history_row": [2, 3], "history_age": [1.0, 2.0]}, "disordered"),
        ({"history_row": [3, 4], "history_age": [3.0, 2.0]}, "unseen"),
    ],
)
def test_a_history_that_leaks_is_counted_and_its_file_named(
    tmp_path: Path, history: dict[str, Any], figure: str
) -> None:
    # Row 4 is first seen an hour before the request at TRAIN + 5 hours.
    first_seen = [START, START, TRAIN + 4 * HOUR]
    sound = {"history_row": [2, 3, 4], "history_age": [24.0, 24.0, 0.99]}
    requests = [
        request(1, TRAIN + 5 * HOUR, **sound),
        request(2, TRAIN + 5 * HOUR, **sound),
        request(3, TEST, history_row=[2], history_age=[70.0]),
    ]
    dataset = write_dataset(tmp_path / "sound", first_seen=first_seen, requests=requests)
    finding = request_checks.history_leakage(dataset)
    assert (finding.severity, finding.figures["entries"]) == ("info", 7)
    requests[1] = request(2, TRAIN + 5 * HOUR, **history)
    dataset = write_dataset(tmp_path / "leak", first_seen=first_seen, requests=requests)
    finding = request_checks.history_leakage(dataset)
    assert finding.severity == "error"
    assert finding.figures == {
        "not_before": 0, "disordered": 0, "unseen": 0, "entries": 6, figure: 1,
    }  # fmt: skip
    assert "day=2026-01-02/part-00000.parquet" in finding.text


def test_a_request_id_that_comes_twice_is_an_error(tmp_path: Path) -> None:
    requests = [request(number, TRAIN + number) for number in (1, 2, 2, 3)]
    requests += [request(3, TEST), request(4, TEST)]
    dataset = write_dataset(tmp_path, num_items=2, requests=requests)
    finding = with_engine(request_checks.repeated_requests, dataset, tmp_path)
    assert finding.severity == "error"
    assert finding.figures == {"ids": 2, "ids_across_windows": 1, "lists": 0}


def test_a_page_that_was_logged_in_both_windows_is_a_warning(tmp_path: Path) -> None:
    page, turned = {"candidate_row": [2, 3, 4]}, {"candidate_row": [3, 2, 4]}
    requests = [
        request(1, TRAIN, **page),
        request(2, TRAIN + 1, **turned),
        request(3, TEST, **page),
        request(4, TEST, user_id=2, **turned),
        request(5, TEST, **page),
    ]
    dataset = write_dataset(tmp_path, num_items=3, requests=requests)
    finding = with_engine(request_checks.repeated_requests, dataset, tmp_path)
    assert finding.severity == "warning"
    assert finding.figures == {"ids": 0, "ids_across_windows": 0, "lists": 1}


def test_held_out_users_in_training_requests_or_sequences_are_counted(tmp_path: Path) -> None:
    def users(held_out: bool, *ids: int) -> list[dict[str, Any]]:
        return [request(100 * i + held_out, TRAIN, user_id=i, held_out=held_out) for i in ids]

    sequences = [
        {"user_id": user, "held_out": held_out, "item_row": [2, 3]}
        for user, held_out in ((1, False), (5, False), (6, True), (7, True), (8, True))
    ]
    dataset = write_dataset(
        tmp_path,
        num_items=2,
        requests=[*users(False, 1, 2, 7), *users(True, 5, 6, 9), request(9_999, TEST)],
        sequences=sequences,
    )
    # 5 trains in a sequence, 7 in a request.
    finding = with_engine(request_checks.holdout_leakage, dataset, tmp_path)
    assert (finding.severity, finding.figures) == ("error", {"users": 2})


def test_candidates_are_counted_by_row_split_and_label(tmp_path: Path) -> None:
    requests = [
        request(1, TRAIN, candidate_row=[2, 3, 3], label_click=[1, 0, 0]),
        request(2, TRAIN + 5, candidate_row=[3], label_click=[1]),
        request(3, TRAIN + 7, candidate_row=[4], label_click=[1], held_out=True),
        request(4, TEST, candidate_row=[4, 2], label_click=[0, 1]),
    ]
    dataset = write_dataset(tmp_path, num_items=3, requests=requests)
    train, held_out, test = (
        count_candidates(dataset, split) for split in ("train", "in_window", "next")
    )
    assert train.shown.tolist() == [0, 0, 1, 3, 0]
    assert train.positive.tolist() == [0, 0, 1, 1, 0]
    assert train.timestamp.tolist() == [TRAIN, TRAIN + 5]
    assert held_out.positive.tolist() == [0, 0, 0, 0, 1]
    assert (test.shown.tolist(), test.positive.tolist()) == ([0, 0, 1, 0, 1], [0, 0, 1, 0, 0])


# Items.


def counts(shown: list[int], positive: list[int], times: list[int]) -> Counts:
    return Counts(np.array(times), np.array([0, 0, *shown]), np.array([0, 0, *positive]))


def test_rows_that_are_only_shown_and_never_clicked_are_counted_by_impressions() -> None:
    train = counts([10, 5, 5, 0], [3, 0, 0, 0], [TRAIN])
    test = counts([4, 1, 1, 2], [2, 1, 0, 1], [TEST])
    (finding,) = item_checks.only_negative_rows(train, test, None)
    assert finding.severity == "info"
    assert finding.figures == {"rows": 2, "share": 0.5, "test_share": 0.5}


def test_rows_that_are_only_drawn_are_counted_by_the_samplers_expectation(
    tmp_path: Path,
) -> None:
    """Rows 2 to 4 with popularities 1, 4 and 3; row 4 is never positive in training."""
    dataset = write_dataset(
        tmp_path,
        num_items=3,
        popularity=[(START, 2, 1), (START, 3, 4), (START, 4, 3)],
        impressions=False,
    )
    sampler = NegativeSampler(dataset, Negatives(alpha=1.0, per_positive=2), 0)
    times = [TRAIN + number for number in range(20)]
    train = counts([4, 16, 0], [4, 16, 0], times)

    def found(in_test: list[int]) -> Finding:
        test = counts(in_test, in_test, [TEST])
        return item_checks.only_negative_rows(train, test, sampler)[0]

    finding = found([1, 3, 1])
    assert finding.figures == pytest.approx({"rows": 1, "share": 3 / 8, "test_share": 0.2})
    assert finding.severity == "warning"
    steep = NegativeSampler(dataset, Negatives(alpha=1.0, per_positive=2), 0)
    train = counts([20, 0, 0], [20, 0, 0], times)
    test = counts([9, 1, 0], [9, 1, 0], [TEST])
    finding = item_checks.only_negative_rows(train, test, steep)[0]
    # 7 of 8 draws on rows with a tenth of the test's positives.
    assert finding.figures == pytest.approx({"rows": 2, "share": 7 / 8, "test_share": 0.1})
    assert finding.severity == "error"


def test_draws_before_an_item_exists_are_counted(tmp_path: Path) -> None:
    dataset = write_dataset(
        tmp_path,
        first_seen=[START, TRAIN + 5, TEST],
        popularity=[(START, 2, 1), (TRAIN, 3, 1), (TEST, 4, 2)],
        impressions=False,
    )
    train = counts([2, 1, 0], [2, 1, 0], [TRAIN, TRAIN + 5, TRAIN + 6])
    test = counts([0, 0, 1], [0, 0, 1], [TEST])
    sound = NegativeSampler(dataset, Negatives(per_positive=4), 0)
    finding = item_checks.only_negative_rows(train, test, sound)[1]
    assert (finding.severity, finding.figures["draws"]) == ("info", 0)
    leak = NegativeSampler(dataset, Negatives(per_positive=4, alpha=1.0, catalogue_leak=True), 0)
    finding = item_checks.only_negative_rows(train, test, leak)[1]
    # Row 3: a quarter of 4 draws at 2 requests; row 4: half of 4 draws at all 4.
    assert finding.figures == pytest.approx({"rows": 2, "draws": 2 + 8, "test_rows": 1})
    assert (finding.name, finding.severity) == ("future_negatives", "error")


@pytest.mark.parametrize(
    ("better", "sampled", "severity"),
    [(0.5, True, "info"), (0.6, True, "warning"), (0.9, True, "error"), (0.9, False, "info")],
)
def test_trivial_scorers_are_judged_by_their_distance_from_chance(
    better: float, sampled: bool, severity: str
) -> None:
    """A positive and ten negatives, a share of them below it: its AUC is that share."""
    labels = np.array([1] + [0] * 10)
    scores = np.array([1] + [0] * round(10 * better) + [2] * round(10 * (1 - better)))
    chance = np.ones(11)
    finding = item_checks.trivial_scorers(
        {"never_trained": scores, "item_age": chance}, labels, sampled
    )
    assert finding.figures == pytest.approx({"never_trained": better, "item_age": 0.5})
    assert finding.severity == severity
    turned = item_checks.trivial_scorers(
        {"never_trained": chance, "item_age": -scores}, labels, sampled
    )
    assert turned.figures["item_age"] == pytest.approx(1 - better)
    assert turned.severity == severity


def test_trivial_scorers_of_one_class_are_undefined() -> None:
    finding = item_checks.trivial_scorers({"item_age": np.ones(3)}, np.ones(3), True)
    assert (finding.severity, finding.figures) == ("info", {})


def test_tiers_are_counted_with_their_positives_in_the_test(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, num_items=3)
    dataset.__dict__["catalog"] = replace(dataset.catalog, tier=np.array([0, 2, 2], np.int8))
    finding = item_checks.tier_sizes(dataset, counts([0, 0, 0], [90, 20, 60], []))
    assert finding.figures == {
        "head_items": 1, "head_positives": 90,
        "torso_items": 0, "torso_positives": 0,
        "tail_items": 2, "tail_positives": 80,
        "cold_items": 0, "cold_positives": 0,
    }  # fmt: skip
    assert finding.severity == "warning"
    assert finding.text.endswith("to chance: torso, cold.")


def test_the_overlap_of_batches_is_the_share_of_items_that_the_one_before_had() -> None:
    batches = [np.array([[2, 3], [0, 1]]), np.array([3, 3, 4, 0]), np.array([5, 6])]
    finding = item_checks.batch_overlap(batches)
    assert finding.figures == {"share": (1 / 2 + 0) / 2, "batches": 3}
    assert item_checks.batch_overlap(batches[:1]).figures == {}


def test_drift_is_half_the_sum_of_differences_of_shares(tmp_path: Path) -> None:
    """Shares of rows 2, 3, 4: pretraining 1/2 1/2 0, fine-tuning 1/4 3/4 0, test 0 1/2 1/2."""
    popularity = [
        (START, 2, 1),
        (START, 3, 1),
        (TRAIN, 2, 1),
        (TRAIN + DAY, 3, 3),
        (TEST, 3, 2),
        (TEST, 4, 2),
        (TEST + DAY, 2, 99),
    ]
    dataset = write_dataset(tmp_path, num_items=3, popularity=popularity)
    finding = item_checks.popularity_drift(dataset)
    assert finding.figures == pytest.approx(
        {"pretrain_to_finetune": 0.25, "finetune_to_test": 0.5, "unseen_in_finetune": 0.5}
    )
    assert finding.severity == "info"


# Scorers.


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return write_dataset(
        tmp_path,
        first_seen=[START, START + HOUR, START + 2 * HOUR],
        support=[3, 0, 1],
        popularity=[
            (START, 2, 8),
            (START + HOUR, 2, 4),
            (START + HOUR, 3, 5),
            (START + 3 * HOUR, 2, 1),
        ],
    )


def test_trivial_scores_equal_numbers_worked_out_by_hand(dataset: Dataset) -> None:
    rows = np.array([2, 2, 2, 2, 3, 4, 1, 0])
    hours = np.array([0.5, 1.0, 2.5, 4.0, 2.0, 4.5, 4.0, 4.0])
    scores = trivial_scores(dataset, rows, START + (hours * HOUR).astype(np.int64))
    assert {name: values.tolist() for name, values in scores.items()} == {
        "never_trained": [1, 1, 1, 1, 0, 1, 0, 0],
        "item_age": [0.5, 1.0, 2.5, 4.0, 1.0, 2.5, 0, 0],
        "as_of_popularity": [0, 8, 12, 13, 5, 0, 0, 0],
    }


def test_recent_popularity_halves_every_half_life_after_its_bucket(dataset: Dataset) -> None:
    negatives = Negatives(popularity="decayed", half_life_hours=1.0)
    hours = np.array([0.5, 1.0, 2.0, 3.0, 4.0])
    timestamps = START + (hours * HOUR).astype(np.int64)
    scores = trivial_scores(dataset, np.full(5, 2), timestamps, negatives)
    # 8 at 1:00; halved and 4 more at 2:00; halved at 3:00; halved and 1 more at 4:00.
    assert scores["recent_popularity"].tolist() == [0, 8, 8, 4, 3]


def test_popularity_equals_a_count_over_all_earlier_buckets(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pairs = {(int(rng.integers(0, 40)), int(rng.integers(2, 22))) for _ in range(300)}
    counts = [(START + b * HOUR, r, int(rng.integers(1, 9))) for b, r in sorted(pairs)]
    dataset = write_dataset(tmp_path, num_items=21, popularity=counts)
    rows = rng.integers(0, 23, 500)
    timestamps = START + rng.integers(-HOUR, 45 * HOUR, 500)
    negatives = Negatives(popularity="decayed", half_life_hours=7.0)
    scores = trivial_scores(dataset, rows, timestamps, negatives)
    for index, (row, timestamp) in enumerate(zip(rows.tolist(), timestamps.tolist(), strict=True)):
        past = [
            (start, count) for start, r, count in counts if r == row and start + HOUR <= timestamp
        ]
        assert scores["as_of_popularity"][index] == sum(count for _, count in past)
        recent = sum(count * 0.5 ** ((timestamp - s - HOUR) / HOUR / 7) for s, count in past)
        assert scores["recent_popularity"][index] == pytest.approx(recent)


def test_a_log_without_positives_scores_0(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, num_items=2)
    scores = trivial_scores(dataset, np.array([2, 3]), np.array([START, START]))
    assert scores["as_of_popularity"].tolist() == [0, 0]
