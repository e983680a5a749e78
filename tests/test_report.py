import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thawline.evaluation.metrics import holdout_curves, holdout_metrics
from thawline.evaluation.report import render_report, write_report
from thawline.evaluation.scored import Scored

HOSTILE = "<script>alert('x')</script>\"'><img src=http://evil.example/x.png>"

DASH = "\N{EN DASH}"

MANIFEST = {
    "data_version": "3f9a1c07b2d4",
    "impressions": False,
    "actions": ["save", "click"],
    "context": {"surface": ["home", "search"]},
    "history_length": 50,
    "pretrain": {"start": "2026-01-01", "end": "2026-01-21"},
    "finetune": {"start": "2026-01-22", "end": "2026-01-28"},
    "test": {"start": "2026-01-29", "end": "2026-01-29"},
    "num_items": 12_345,
    "requests": {"train": 61_234, "in_window": 2_500, "next": 9_000},
    "requests_by_day": {"2026-01-28": 70, "2026-01-29": 90},
    "sequences": {"train": 8_123, "held_out": 401},
    "rejected": {"null_item_id": 17},
}

PLAN = {
    "windows": [[1, 2]],
    "tiers": {},
    "renewal": None,
    "curve": {"kind": "constant", "warm_up": 0.0, "restart": False},
    "reset_state": True,
}
SCHEDULE = {
    "epochs": 2,
    "components": {
        "item": PLAN | {"replayed": 0.0},
        "user": PLAN | {"windows": [[0.5, 1.5]], "replayed": 0.5},
        "dense": PLAN | {"windows": [[0, 2]], "replayed": 1.0},
    },
}


def holdout(seed: int, *, actions: tuple[str, ...] = ("save", "click")) -> dict[str, Any]:
    """200 requests of 5 candidates on items of three tiers; the tail has none."""
    generator = np.random.default_rng(seed)
    shape = (1_000, len(actions))
    truth = generator.random(shape)
    found = Scored(
        actions=list(actions),
        request_id=np.arange(200),
        timestamp=np.zeros(200, np.int64),
        offsets=np.arange(0, 1_001, 5),
        row=generator.choice([2, 3, 5], 1_000),
        labels=(generator.random(shape) < truth).astype(np.int8),
        logits=(3 * truth - 1.5 + generator.normal(size=shape)).astype(np.float32),
        oracle=truth.astype(np.float32),
    )
    trivial = {"item_age": truth[:, 0], "never_trained": np.zeros(1_000)}
    tree = holdout_metrics(found, np.array([0, 1, 2, 3], np.int8), hit_at=3, trivial=trivial)
    return tree | {"curves": holdout_curves(found)}


@pytest.fixture(scope="module")
def evaluation() -> dict[str, Any]:
    epochs = [
        {
            "epoch": number,
            "losses": {"total": 0.7 - number / 10, "head": 0.4321},
            "seconds": 61.0,
            "trained": {"item": float(number == 1)},
            "drift": {
                "item": {"head": 0.125 * number, "torso": 0.0625, "cold": 0.0},
                "user": {"head": 0.75},
            },
            "metrics": {"next": holdout(number), "in_window": holdout(number + 10)},
        }
        for number in range(2)
    ]
    return {
        "title": "thawline-ranker",
        "metrics": {"next": holdout(1), "in_window": holdout(2)},
        "epochs": epochs,
        "schedule": SCHEDULE,
        "passed": True,
        "reasons": ["save AUC on next is 0.7123, at least gate.min_auc 0.5"],
        "model": {"recipe": "freeze-until-last", "data_version": "3f9a1c07b2d4", "seed": 4},
        "dataset": MANIFEST,
        "facts": {"git_commit": "4db691c"},
        "timings": {"evaluate": 83.2},
        "audit": {
            "findings": [
                {
                    "name": "catalogue_leak",
                    "severity": "error",
                    "text": "negatives.catalogue_leak is on.",
                    "remedy": "drop it",
                    "waived": True,
                },
                {
                    "name": "tier_sizes",
                    "severity": "info",
                    "text": "Items by tier: head 3.",
                    "remedy": "",
                    "waived": False,
                },
            ]
        },
        "config": "seed: 4\n",
    }


@pytest.fixture(scope="module")
def page(evaluation: dict[str, Any]) -> str:
    return render_report(json.loads(json.dumps(evaluation)))


class _Reader(HTMLParser):
    """Gathers what a page loads, its visible text, and tags that never close."""

    VOID = ("meta", "br", "img", "link", "input", "hr")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        names = ("src", "href", "xlink:href", "srcset", "data", "action", "poster")
        self.addresses += [value or "" for name, value in attrs if name in names]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def test_the_page_is_one_self_contained_file_under_a_megabyte(
    evaluation: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    write_report(path, evaluation)
    assert path.stat().st_size < 1_000_000
    text = path.read_text(encoding="utf-8")
    reader = _Reader(text)
    assert reader.addresses
    assert all(address.startswith("#") for address in reader.addresses)
    assert "http" not in text
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.tags)
    assert not reader.open


def test_every_reference_within_the_page_resolves_to_one_element(page: str) -> None:
    ids = re.findall(r'\bid="([^"]+)"', page)
    used = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page)
    assert {first or second for first, second in used} <= set(ids)


def test_the_page_holds_the_figures_of_every_head_tier_and_hold_out(
    evaluation: dict[str, Any], page: str
) -> None:
    text = _Reader(page).text
    for tree in evaluation["metrics"].values():
        for slices in (tree["pooled"], *tree["tiers"].values(), tree["oracle"]):
            for figures in slices.values():
                for name in ("auc", "log_loss", "hit@3"):
                    if figures[name] is not None:
                        assert f"{figures[name]:.4f}" in text
        for value in tree["trivial"].values():
            assert f"{value:.4f}" in text


def test_the_page_says_what_was_made_from_what(page: str) -> None:
    text = _Reader(page).text
    for words in (
        "with the recipe freeze-until-last for 2 epochs on data version 3f9a1c07b2d4",
        "Passed the gate save AUC on next is 0.7123",
        "item_age",
        "flattered",
        "12,345",
        "train 61,234",
        "null item id 17",
        "2026-01-22 to 2026-01-28",
        "4db691c",
        "1 min 23 s",
        "frozen",
        "trains",
        "HIT@3",
        "total loss head loss",
        "0.6000 0.4321",
        "catalogue leak error, waived negatives.catalogue_leak is on. To do: drop it.",
        "tier sizes info Items by tier: head 3.",
        "Shaded: the item table trains.",
        "The item table trains in epoch 2 of 2 only; no example is seen again after its rows were",
        "50% of the examples are seen again after their rows were written.",
        f"Drift of the item rows epoch head torso tail cold 1 0.0000 0.0625 {DASH} 0.0000 2 0.1250",
        "Drift of the user rows",
    ):
        assert words in text


def test_undefined_figures_are_dashes_with_a_note(page: str) -> None:
    text = _Reader(page).text
    assert f"tail {DASH} {DASH} {DASH} 0 0" in text
    assert f"{DASH} is undefined" in text
    assert "None" not in text
    assert not re.search(r"\bnan\b", text, flags=re.I)


def test_a_refusal_is_said_with_its_reason(evaluation: dict[str, Any]) -> None:
    refused = evaluation | {"passed": False, "reasons": ["save AUC on next is undefined"]}
    assert (
        "Refused by the gate save AUC on next is undefined" in _Reader(render_report(refused)).text
    )


def test_hostile_names_are_text_wherever_they_stand(evaluation: dict[str, Any]) -> None:
    manifest = MANIFEST | {
        "data_version": HOSTILE,
        "actions": [HOSTILE],
        "context": {HOSTILE: ["a"]},
        "rejected": {HOSTILE: 3},
    }
    tree = holdout(3, actions=(HOSTILE,))
    tree["trivial"] = {HOSTILE: 0.9}
    told = dict.fromkeys(("name", "severity", "text", "remedy"), HOSTILE)
    hostile_finding = told | {"waived": False}
    hostile = {
        "title": HOSTILE,
        "metrics": {HOSTILE: tree},
        "epochs": [
            {
                "metrics": {HOSTILE: tree},
                "losses": {HOSTILE: 0.5},
                "trained": {"item": 1.0},
                "drift": {HOSTILE: {"head": 0.5}},
            }
        ],
        "schedule": {"epochs": 2, "components": {HOSTILE: PLAN}},
        "passed": False,
        "reasons": [HOSTILE],
        "model": {"recipe": HOSTILE, "model": {HOSTILE: HOSTILE}},
        "dataset": manifest,
        "facts": {HOSTILE: HOSTILE},
        "timings": {HOSTILE: 1.0},
        "config": HOSTILE,
        "audit": {"findings": [hostile_finding]},
    }
    reader = _Reader(render_report(hostile))
    assert not {"script", "img"} & set(reader.tags)
    assert "<script>alert('x')</script>" in reader.text


def test_metrics_alone_make_a_page(evaluation: dict[str, Any]) -> None:
    metrics = {
        name: {key: value for key, value in tree.items() if key != "curves"}
        for name, tree in evaluation["metrics"].items()
    }
    text = _Reader(render_report({"metrics": metrics})).text
    assert f"{metrics['next']['pooled']['save']['auc']:.4f}" in text
    assert "Training" not in text


def test_a_model_of_which_no_schedule_is_known_has_a_page(evaluation: dict[str, Any]) -> None:
    known = {key: value for key, value in evaluation.items() if key != "schedule"}
    known["epochs"] = [
        {key: value for key, value in entry.items() if key != "drift"}
        for entry in evaluation["epochs"]
    ]
    text = _Reader(render_report(known)).text
    assert "Shaded" not in text
    assert "When each component trains" not in text
    assert "Drift" not in text
    assert "frozen" in text


def test_the_same_evaluation_gives_the_same_page(evaluation: dict[str, Any], page: str) -> None:
    assert render_report(evaluation) == page


def test_plots_take_every_colour_from_the_page(page: str) -> None:
    drawings = re.findall(r"<svg.*?</svg>", page, flags=re.S)
    assert len(drawings) == 2 * (2 + 2) + 2
    for drawing in drawings:
        assert not re.search(r"#[0-9a-f]{6}\b(?!\w)", re.sub(r'(id|href)="[^"]*"', "", drawing))
        assert "currentColor" in drawing or "var(--" in drawing


def test_thirty_epochs_of_seven_actions_take_half_a_megabyte_a_hold_out() -> None:
    tree = holdout(0, actions=tuple(f"action_{index}" for index in range(7)))
    epochs = [{"metrics": {"next": tree}, "trained": {"item": 0.5}}] * 30
    page = render_report({"metrics": {"next": tree}, "epochs": epochs})
    assert len(page.encode()) < 500_000
    assert "trains 50%" in page
