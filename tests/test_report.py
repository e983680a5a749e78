import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_trees import CHAMPION, GATE, figures, holdout

from thawline.evaluation.report import render_report, write_report

HOSTILE = "<script>alert('x')</script>\"'><img src=http://evil.example/x.png>"

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


OLD_FIGURES = ("auc", "log_loss", "hit@3", "positives", "candidates")
NEW_KEYS = ("users", "slices", "intervals", "retrieval")


def light(auc: float) -> dict[str, Any]:
    """A hold-out as it is scored after an epoch."""
    tree = holdout(auc)
    return {key: tree[key] for key in ("requests", "pooled", "tiers", "oracle")} | {
        "trivial": {},
        "requests": 2_000,
    }


def old(auc: float) -> dict[str, Any]:
    """A hold-out as Thawline 0.1 wrote it at first."""
    tree = {key: value for key, value in holdout(auc).items() if key not in NEW_KEYS}

    def only(heads: dict[str, Any]) -> dict[str, Any]:
        return {action: {name: m[name] for name in OLD_FIGURES} for action, m in heads.items()}

    tree["pooled"], tree["oracle"] = only(tree["pooled"]), only(tree["oracle"])
    tree["tiers"] = {tier: only(heads) for tier, heads in tree["tiers"].items()}
    return tree


@pytest.fixture(scope="module")
def evaluation() -> dict[str, Any]:
    epochs = [
        {
            "epoch": number,
            "losses": {"total": 0.7 - number / 10, "head": 0.4321},
            "seconds": 61.0,
            "trained": {"item": float(number)},
            "drift": {
                "item": {"head": 0.125 * number, "torso": 0.0625, "cold": 0.0},
                "user": {"head": 0.75},
            },
            "metrics": {"next": light(0.70 + number / 10), "in_window": light(0.70)},
            "phases": {"forward": 20.0, "backward": 30.0},
        }
        for number in range(2)
    ]
    return {
        "title": "thawline-ranker",
        "metrics": {"next": holdout(0.75), "in_window": holdout(0.73)},
        "epochs": epochs,
        "schedule": SCHEDULE,
        "passed": False,
        "reasons": ["save AUC of cold items on next is 0.0500 below the champion's."],
        "gate": GATE,
        "champion": CHAMPION,
        "model": {
            "recipe": "freeze-until-last",
            "data_version": "3f9a1c07b2d4",
            "seed": 4,
            "accumulation": "exact, 4 micro-batches a step",
        },
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
        text = re.sub(r"\s+", " ", " ".join(self.words))
        return text.replace("\N{EN DASH}", "-").replace("\N{MINUS SIGN}", "-")


def test_the_page_is_self_contained_and_under_a_megabyte(page: str) -> None:
    assert len(page.encode()) < 1_000_000
    reader = _Reader(page)
    assert reader.addresses
    assert all(address.startswith("#") for address in reader.addresses)
    assert "http" not in page
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
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
            for values in slices.values():
                for name in figures(0.5):
                    if values[name] is not None and name not in ("positives", "candidates"):
                        assert f"{values[name]:.4f}" in text
        for values in tree["slices"].values():
            for heads in values.values():
                if heads["save"]["auc"] is not None:
                    assert f"{heads['save']['auc']:.4f}" in text
        for value in tree["trivial"].values():
            assert f"{value:.4f}" in text


def test_the_page_says_what_was_made_from_what(page: str) -> None:
    text = _Reader(page).text
    for words in (
        "with the recipe freeze-until-last for 2 epochs on data version 3f9a1c07b2d4",
        "item age",
        "flattered",
        "12,345",
        "train 61,234",
        "null item id 17",
        "2026-01-22 to 2026-01-28",
        "accumulation exact, 4 micro-batches a step",
        "4db691c",
        "evaluate 1 min 23 s",
        "fine-tuning, 2 epochs 2 min 02 s of which forward 40.0 s of which backward 1 min 00 s",
        "epoch 1 2 item table frozen trains total loss 0.7000 0.6000 head loss 0.4321 0.4321 "
        "save AUC, next 0.7000 0.8000 save AUC, in_window 0.7000 0.7000 time 1 min 01 s",
        "error, waived catalogue leak negatives.catalogue_leak is on. To do: drop it.",
        "info tier sizes Items by tier: head 3.",
        "Shaded: the item table trains.",
        "Epochs were scored on 2,000 of the 9,000 requests",
        "The item table trains in epoch 2 of 2 only; no example is seen again after its rows were",
        "50% of the examples are seen again after their rows were written.",
        "Drift of the item rows epoch head torso tail cold 1 0.0000 0.0625 - 0.0000 2 0.1250",
        "Drift of the user rows",
        "recall@20 0.3125 NDCG@20 0.1875 MRR 0.0625 requests 8,192",
    ):
        assert words in text


def test_epochs_that_trials_share_are_told_beside_their_time(evaluation: dict[str, Any]) -> None:
    first, *others = evaluation["epochs"]
    page = render_report({**evaluation, "epochs": [{**first, "shared": True}, *others]})
    assert "fine-tuning, 2 epochs, 1 of them shared with other trials" in _Reader(page).text


def test_figures_stand_by_tier_with_their_intervals(page: str) -> None:
    text = _Reader(page).text
    assert "pooled head torso tail cold oracle AUC" in text
    assert (
        "AUC 0.7500 0.7460-0.7540 0.7800 0.7500-0.8100 0.7300 0.7000-0.7600 "
        "- 0.6000 0.5700-0.6300 0.9000 AUC within users 0.7400"
    ) in text
    # There is none where too few resamples define the figure.
    assert "MRR 0.1875 0.1950 0.1825 - 0.1500 0.2250" in text
    assert "positives 400 400 400 0 400 400" in text


def test_undefined_figures_are_dashes_with_a_note(page: str) -> None:
    text = _Reader(page).text
    assert "head 0.7800 torso 0.7300 tail - cold 0.6000" in text
    assert "- is undefined" in text
    assert "None" not in text
    assert not re.search(r"\bnan\b", text, flags=re.I)


def test_slices_of_an_action_share_a_scale_that_thin_ones_do_not_set(page: str) -> None:
    text = _Reader(page).text
    # 0.67 is the least of the slices with 50 positives, 0.77 the greatest; 0.65 has but 12.
    assert "By surface home 0.7600 search 0.7200 push - 0.67 0.77" in text
    assert "By history length 0 0.6500 1 to 4 0.7100 5 and more 0.7600 0.67 0.77" in text
    assert "Hollow: fewer than 50 positives" in text


def test_the_gate_is_told_rule_by_rule(page: str) -> None:
    text = _Reader(page).text
    for words in (
        "Refused by the gate 2 passed, 1 failed, 1 undecided of 4 rules",
        "✕ failed save auc cold not below the champion's by more than 0.01 "
        "save AUC of cold items on next is 0.0500 below the champion's.",
        "? undecided save calibration within 0.02 save calibration on next",
        "✓ passed no errors in the audit The audit found none.",
        "1 of the gate's 4 rules failed: save auc cold not below",
        "1 of the gate's 4 rules could not be decided: save calibration within 0.02.",
    ):
        assert words in text


def test_the_comparison_with_the_champion_is_told_slice_by_slice(page: str) -> None:
    text = _Reader(page).text
    for words in (
        "Compared with feed-ranker version 3",
        "its recipe co-train its data version aa51f0c2d3",
        "next 9,000 requests, 2,000 users save: AUC pooled +0.0100 "
        "0.7500 against 0.7400, +0.0060 to +0.0140, could show 0.0056",
        "cold -0.0500 0.6000 against 0.6500, -0.0800 to -0.0200, could show 0.0420 -0.10 +0.04",
        "Other figures on next save: log loss pooled -0.0200",
    ):
        assert words in text


def test_the_first_screen_says_what_its_words_mean(page: str, evaluation: dict[str, Any]) -> None:
    first, _, rest = page.partition("</header>")
    text = _Reader(f"{first}</header></main></body></html>").text
    for words in (
        "AUC how often a positive is scored above a negative; 0.5 is chance",
        "pooled over all candidates of a hold-out, whatever their tier",
        "oracle a scorer that knows the simulator's true probabilities",
        "undecided the data are too few to tell",
    ):
        assert words in text
    assert 'class="legend"' not in rest
    # Only what is said there.
    assert "never_trained" not in text
    leak = {name: tree | {"trivial": {"never_trained": 0.9}} for name, tree in
            evaluation["metrics"].items()}  # fmt: skip
    text = _Reader(render_report(evaluation | {"metrics": leak})).text
    assert "never_trained a scorer that only knows whether fine-tuning had a positive" in text
    none = render_report({"metrics": {}, "passed": True})
    assert 'class="legend"' not in none


def test_weighted_requests_are_told(evaluation: dict[str, Any]) -> None:
    said = "Requests count by the weights that the log gives them."
    assert said not in _Reader(render_report(evaluation)).text
    weighted = evaluation | {"dataset": MANIFEST | {"weighted": True}}
    assert said in _Reader(render_report(weighted)).text


def test_a_verdict_without_rules_is_said_with_its_reason() -> None:
    plain = {"metrics": {"next": light(0.75)}}
    for passed, words in ((False, "Refused by"), (True, "Passed")):
        text = _Reader(render_report(plain | {"passed": passed, "reasons": ["as it is"]})).text
        assert f"{words} the gate as it is" in text


def test_hostile_names_are_text_wherever_they_stand(evaluation: dict[str, Any]) -> None:
    manifest = MANIFEST | {
        "data_version": HOSTILE,
        "actions": [HOSTILE],
        "context": {HOSTILE: ["a"]},
        "rejected": {HOSTILE: 3},
    }
    tree = holdout(actions=(HOSTILE,))
    tree["trivial"] = {HOSTILE: 0.9}
    tree["slices"] = {HOSTILE: {HOSTILE: {HOSTILE: figures(0.7)}}}
    tree["retrieval"] = {HOSTILE: 0.5}
    line = CHAMPION["comparison"]["next"][0] | {"action": HOSTILE, "slice": HOSTILE}
    champion = {
        "name": HOSTILE,
        "version": HOSTILE,
        "recipe": HOSTILE,
        "data_version": HOSTILE,
        "comparison": {HOSTILE: [line]},
    }
    rule = dict.fromkeys(("name", "reason", "value", "low", "high", "bound"), HOSTILE)
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
        "gate": {"rules": [rule | {"status": "failed", "low": None, "high": None}]},
        "champion": champion,
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


def test_an_evaluation_of_an_earlier_version_has_a_page() -> None:
    text = _Reader(render_report({"metrics": {"next": old(0.75)}, "passed": True})).text
    assert "It was not compared with another model." in text
    assert "AUC 0.7500 0.7800 0.7300 - 0.6000 0.9000 HIT@3 0.3750" in text
    for absent in ("Training", "bootstrap", "Retrieval", "by slice", "Compared with", "ECE 0"):
        assert absent not in text.partition("What the figures mean")[0]


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


def test_the_same_evaluation_is_written_as_the_same_page(
    evaluation: dict[str, Any], page: str, tmp_path: Path
) -> None:
    write_report(tmp_path / "report.html", evaluation)
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page


def test_plots_take_every_colour_from_the_page(page: str) -> None:
    drawings = re.findall(r"<svg.*?</svg>", page, flags=re.S)
    # AUC by epoch and calibration of each action, ROC of the primary one; losses, schedule, days.
    assert len(drawings) == 2 * (2 + 2 + 1) + 3
    for drawing in drawings:
        assert not re.search(r"#[0-9a-f]{6}\b(?!\w)", re.sub(r'(id|href)="[^"]*"', "", drawing))
        assert "currentColor" in drawing or "var(--" in drawing


def test_a_long_run_of_many_actions_and_slices_stays_under_a_megabyte_a_hold_out() -> None:
    tree = holdout(actions=tuple(f"action_{index}" for index in range(7)))
    values = {f"value {index}": figures(0.7) for index in range(20)}
    tree["slices"] |= {
        f"context.column_{column}": {
            name: {f"action_{index}": own for index in range(7)} for name, own in values.items()
        }
        for column in range(6)
    }
    epochs = [{"metrics": {"next": tree}, "trained": {"item": 0.5}}] * 30
    page = render_report({"metrics": {"next": tree}, "epochs": epochs})
    assert len(page.encode()) < 1_000_000
    assert "trains 50%" in page
