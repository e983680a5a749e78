"""The explorer: its numbers are the Parquet file's, its texts stay texts, a browser shows both."""

import html
import itertools
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from urllib.parse import urlencode

import numpy as np
import pandas as pd
import pytest

from thawline.config import Study, parse_config
from thawline.evaluation import formatting
from thawline.stages.study_report import report_only, study_facts
from thawline.study import explorer_data
from thawline.study.comparison import compare_arms
from thawline.study.design import Design, dimensions_of
from thawline.study.explorer import embedded, render_explorer
from thawline.study.explorer_arms import dimensions_of as explored_dimensions
from thawline.study.explorer_arms import exposure_of, timelines_of
from thawline.study.explorer_data import study_data
from thawline.study.trials import tidy, write_study
from thawline.training.recipes import make_schedule
from thawline.training.timeline import describe

SLICES = ("pooled", "head", "cold")
RATE = "tables.item.learning_rate"
GRID = {"finetune.recipe": ["co-train", "freeze-until-last", "frozen"], RATE: [0.02, 0.2]}
EVIL = "</script><script>alert(1)</script><!--"


def made(study, *, missing=()):
    """Facts and table of a study whose figures are drawn at random.

    Args:
        study: The section.
        missing: Names of (arm, seed) that failed.
    """
    config = parse_config("simulate: {}").model_copy(update={"study": Study.model_validate(study)})
    design, draws, results = Design.of(config), np.random.default_rng(0), []

    def tree():
        pieces = {
            piece: {
                action: {"auc": draws.uniform(0.6, 0.8), "log_loss": draws.uniform(0.2, 0.4)}
                for action in ("click", "save")
            }
            for piece in SLICES
        }
        return {"requests": 10, "pooled": pieces.pop("pooled"), "tiers": pieces}

    def trees():
        return {holdout: tree() for holdout in ("next", "in_window")}

    def training():
        tiers = {tier: {"item": {"drift": draws.uniform(0, 2)}} for tier in ("head", "cold")}
        return {"requests": None, "pooled": {"all": {"seconds": 41.5}}, "tiers": tiers}

    for number, trial in enumerate(design.trials()):
        own = {
            "trial": f"t{number}",
            "arm": trial.arm.name,
            "seed": trial.seed,
            "round": trial.epochs,
            "values": dict(trial.arm.values),
        }
        if (trial.arm.name, trial.seed) in missing:
            results.append(own | {"status": "failed", "error": "no luck", "remedy": ""})
            continue
        schedule = make_schedule(trial.config, list(trial.config.events.context))
        results.append(
            own
            | {
                "status": "finished",
                "seconds": 61.0,
                "exported_epoch": trial.epochs,
                "actions": ["click", "save"],
                "data_version": "v",
                "schedule": describe(schedule, ["item", "dense"]),
                "epochs": [trees() for _ in range(trial.epochs)],
                "metrics": trees(),
                "training": {
                    "epochs": [training() for _ in range(trial.epochs)],
                    "final": training(),
                },
            }
        )
    return study_facts(design, results), tidy(results, list(dimensions_of(design.study)))


@pytest.fixture(scope="module")
def study():
    return made(
        {"grid": GRID, "seeds": [0, 1, 2], "baseline": "co-train"},
        missing=[("frozen, learning_rate 0.2", 1)],
    )


@pytest.fixture(scope="module")
def folder(study, tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    write_study(folder, *study)
    report_only(folder)
    return folder


def data_of(page):
    """What the page has embedded."""
    (text,) = re.findall(r'<script type="application/json" id="explorer-data">(.*?)</script>', page)
    return json.loads(text)["studies"]


def old(facts):
    """As studies were written that know nothing of exposure."""
    arms = [
        {key: own for key, own in arm.items() if key not in ("exposure", "resolved", "changes")}
        for arm in facts["arms"]
    ]
    return facts | {"arms": arms}


def test_every_value_on_the_page_is_the_parquet_files(folder):
    (data,) = data_of((folder / "study.html").read_text(encoding="utf-8"))
    trials = pd.read_parquet(folder / "trials.parquet").query("holdout != 'training'")
    final = trials[trials.final].set_index(["holdout", "action", "figure", "slice", "arm", "seed"])
    shown = {
        (*place.split("|"), piece, data["arms"][arm]["name"], data["seeds"][seed]): value
        for place, pieces in data["values"].items()
        for piece, arms in pieces.items()
        for arm, values in enumerate(arms)
        for seed, value in enumerate(values)
        if value is not None
    }
    # 17 trials, of 2 hold-outs, 2 actions, 2 figures and 3 slices each; not rounded.
    assert len(shown) == 17 * 2 * 2 * 2 * 3
    assert shown == final.value.to_dict()
    means = trials[trials.final].groupby(["holdout", "action", "figure", "slice", "arm"]).value
    for (holdout, action, figure, piece, arm), (mean, sd) in means.agg(["mean", "std"]).iterrows():
        place, at = "|".join((holdout, action, figure)), [each["name"] for each in data["arms"]]
        assert data["means"][place][piece][at.index(arm)] == pytest.approx(mean, rel=1e-6)
        assert data["sds"][place][piece][at.index(arm)] == pytest.approx(sd, rel=1e-6)
    after = trials[~trials.final].query("figure == 'auc' and action == 'click' and slice == 'cold'")
    course = after[(after.holdout == "next") & (after.arm == data["arms"][3]["name"])]
    assert data["epochs"]["next|click|auc"]["cold"][3] == pytest.approx(
        list(course.groupby("epoch").value.mean()), rel=1e-6
    )


def test_drift_and_seconds_are_the_means_of_the_parquet_files(folder):
    (data,) = data_of((folder / "study.html").read_text(encoding="utf-8"))
    trials = pd.read_parquet(folder / "trials.parquet").query("holdout == 'training' and final")
    for place, arm in enumerate(data["arms"]):
        own = trials[(trials.arm == arm["name"]) & (trials.figure == "drift")]
        drift = {tier: arms[place] for tier, arms in data["drift"]["item"].items()}
        assert drift == pytest.approx(own.groupby("slice").value.mean().to_dict(), rel=1e-6)
    assert data["seconds"] == {"trial": [61.0] * 6, "training": [41.5] * 6}


def test_any_two_arms_are_compared_as_the_tables_compare_an_arm_with_its_baseline(study):
    facts, table = study
    data = study_data("x", facts, table)
    names = [arm["name"] for arm in data["arms"]]
    assert data["compared"] == list(itertools.combinations(range(6), 2))
    for baseline in names:
        # As if the study had compared all with this arm.
        told = facts | {"arms": [arm | {"baseline": baseline} for arm in facts["arms"]]}
        rows = [row for row in compare_arms(told, table) if row["baseline"]]
        for row in rows:
            if row["holdout"] == "training":
                continue
            place = "|".join((row["holdout"], row["action"], row["figure"]))
            pair = sorted((names.index(row["arm"]), names.index(baseline)))
            turned = names.index(row["arm"]) > names.index(baseline)
            at = 3 * data["compared"].index(tuple(pair))
            mean, sd, verdict = data["pairs"][place][row["slice"]][at : at + 3]
            found = data["verdicts"][verdict]
            assert (-mean if turned else mean) == pytest.approx(row["difference"], rel=1e-6)
            assert sd == pytest.approx(row["difference_sd"], rel=1e-6)
            assert found["n"] == row["n"]
            assert found["p"] == row["p_value"]
            assert found["words"][turned] == row["words"]
            low = row["difference"] - found["reach"] * sd
            assert low == pytest.approx(row["low"], abs=1e-6)


def test_beyond_so_many_arms_those_are_compared_that_differ_in_one_setting(study, monkeypatch):
    monkeypatch.setattr(explorer_data, "ALL_PAIRS", 5)
    data = study_data("x", *study)
    # Within each learning rate three recipes, and each recipe at both learning rates.
    assert data["compared"] == [
        (0, 1), (0, 2), (0, 4), (1, 3), (1, 5), (2, 3), (2, 4), (3, 5), (4, 5)
    ]  # fmt: skip


def test_what_can_be_chosen_is_what_varies(study):
    data = study_data("x", *study)
    assert [(each["label"], each["values"]) for each in data["dimensions"]] == [
        ("recipe", GRID["finetune.recipe"]),
        ("item table learning rate", ["0.02", "0.2"]),
    ]
    assert data["arms"][3]["at"] == [1, 1]
    assert (data["holdouts"], data["actions"]) == (["next", "in_window"], ["click", "save"])
    assert [each["key"] for each in data["figures"]] == ["auc", "log_loss"]
    assert [each["better"] for each in data["figures"]] == ["higher", "lower"]
    facts, _ = study
    alone = facts | {"arms": [facts["arms"][0]]}
    assert explored_dimensions(alone) == [
        {"key": "arm", "label": "arm", "values": ["co-train, learning_rate 0.02"]}
    ]


@pytest.mark.parametrize(
    ("recipe", "replayed", "moving"),
    [
        ("co-train", "every one", "throughout"),
        ("freeze-until-last", "no", "in one epoch"),
        ("frozen", "no", "never"),
    ],
)
def test_exposure_is_said_in_words(study, recipe, replayed, moving):
    facts, _ = study
    arm = next(arm for arm in facts["arms"] if arm["name"].startswith(f"{recipe},"))
    found = exposure_of(arm)
    assert [each["value"] for each in found["replayed"]] == [replayed]
    assert [each["value"] for each in found["moving"]] == [moving]
    (before,) = old({"arms": [arm]})["arms"]
    # The schedule itself has the share of the examples that are replayed.
    assert exposure_of(before) == {"replayed": found["replayed"], "moving": []}
    partly = arm | {"exposure": {"item": {"replayed": 0.667, "moving": 0.5}}}
    if recipe == "co-train":
        assert exposure_of(partly)["replayed"][0]["value"] == "67%"
        assert "50% of the network's training" in exposure_of(partly)["moving"][0]["words"]


def test_components_that_train_alike_share_a_line_of_the_timeline():
    config = parse_config(
        "simulate: {}\ntables: {user: {column: user_id}}", ["finetune.recipe=stratified"]
    )
    schedule = describe(
        make_schedule(config, []), ["dense", "item", "history_action", "ctx_hour", "user"]
    )
    (drawn,), places = timelines_of({"arms": [{"schedule": schedule}, {"schedule": None}]})
    lines = {line["name"]: line["spans"] for line in drawn["lines"]}
    assert [*lines][-1] == "network"
    assert lines["network"] == [[[0, 1], [3, 1]]]
    assert lines["item tail, user tail rows"] == [[[2, 1], [3, 1]]]
    assert (drawn["epochs"], places) == (3, [0, None])


def test_studies_that_know_no_exposure_drift_or_seconds_have_a_page(study):
    facts, table = study
    kept = table.filter([name != "training" for name in table["holdout"].to_pylist()])
    (data,) = data_of(render_explorer([("old", old(facts), kept)]))
    assert data["drift"] == {}
    assert data["seconds"]["training"] == [None] * 6
    assert len(data["values"]) == 2 * 2 * 2


def test_a_study_of_which_nothing_finished_is_listed_and_cannot_be_chosen(study):
    facts, table = study
    nothing = facts | {"trials": [], "action": None}
    page = render_explorer([("empty", nothing, table.slice(0, 0))])
    assert data_of(page) == []
    assert "Nothing has been found yet." in page


class Scripts(HTMLParser):
    """The tags of a page and what its scripts hold, as a browser would part them."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.scripts = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += data

    def handle_endtag(self, tag):
        self.tags.append(("/", {}))


def test_no_text_of_a_config_leaves_its_place(tmp_path):
    facts, table = made(
        {
            "arms": {"co-train": {}, EVIL: {"set": {"finetune.recipe": "frozen"}}},
            "seeds": [0],
            "baseline": "co-train",
        }
    )
    write_study(tmp_path, facts, table)
    report_only(tmp_path)
    pages = [
        (tmp_path / "study.html").read_text(encoding="utf-8"),
        render_explorer([(EVIL, facts, table)], title=EVIL, pages={EVIL: f"{EVIL}/study.html"}),
    ]
    for page in pages:
        found = Scripts(page)
        assert len(found.scripts) == 2
        assert "alert(1)" not in found.scripts[1]
        assert [arm["name"] for arm in data_of(page)[0]["arms"]] == ["co-train", EVIL]
        assert EVIL not in page
        assert html.escape(EVIL) in page
    assert embedded(["\u2028&"]) == '["\\u2028\\u0026"]'


def test_the_page_loads_nothing(study):
    page = render_explorer([("one", *study)])
    assert "http" not in page
    assert not [attrs for _, attrs in Scripts(page).tags if "src" in attrs]


def test_several_studies_have_a_table_each_without_a_script(study):
    facts, table = study
    page = render_explorer(
        [("Timing", facts, table), ("Leak", facts, table)],
        pages={"Timing": "timing/study.html"},
        questions={"Leak": "Does <it> leak?"},
        others={"Measured": "measured/study.html"},
    )
    assert [each["name"] for each in data_of(page)] == ["Timing", "Leak"]
    assert [each["href"] for each in data_of(page)] == ["timing/study.html", None]
    assert [each["question"] for each in data_of(page)] == ["", "Does <it> leak?"]
    assert page.count('<a href="timing/study.html">Timing</a>') == 1
    assert page.count('<a href="measured/study.html">Measured</a>') == 1
    assert page.count("Does &lt;it&gt; leak?") == 1
    row = next(
        row
        for row in compare_arms(facts, table)
        if row["baseline"]
        and (row["holdout"], row["action"], row["slice"], row["figure"])
        == (facts["holdout"], facts["action"], "pooled", "auc")
    )
    assert page.count(f"<td>{formatting.signed(row['difference'])}</td>") == 2
    assert page.count(row["words"]) >= 2


def test_studies_of_several_datasets_say_which_is_theirs(study):
    names = {"news: Timing": "news", "feed: Timing": "feed", "feed: Leak": "feed"}
    page = render_explorer([(name, *study) for name in names], datasets=names)
    assert [(each["dataset"], each["title"]) for each in data_of(page)] == [
        ("news", "Timing"),
        ("feed", "Timing"),
        ("feed", "Leak"),
    ]


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
def test_the_script_is_javascript(study, tmp_path):
    script = Scripts(render_explorer([("one", *study)])).scripts[1]
    (tmp_path / "explorer.js").write_text(script, encoding="utf-8")
    subprocess.run(["node", "--check", tmp_path / "explorer.js"], check=True)


BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)


def shown(path, folder, **chosen):
    """What a browser makes of a page."""
    address = path.as_uri() + (f"#{urlencode(chosen)}" if chosen else "")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    own = f"--user-data-dir={folder / 'profile'}"
    found = subprocess.run(
        [BROWSER, *options, own, "--virtual-time-budget=2000", "--dump-dom", address],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    text = found.stdout
    return text[text.index('id="explorer-app"') : text.index('id="explorer-data"')]


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no browser")
def test_a_browser_shows_the_numbers_of_the_choice_in_the_address(study, folder, tmp_path):
    facts, table = study
    page = folder / "study.html"
    first = shown(page, tmp_path)
    assert "freeze-until-last, learning_rate 0.02" in first
    arm, baseline = "freeze-until-last, learning_rate 0.2", "frozen, learning_rate 0.02"
    text = shown(
        page,
        tmp_path,
        study="this study",
        arm=arm,
        against=f"each:{baseline}",
        metric="log_loss",
        action="save",
        holdout="in_window",
        slice="cold",
    )
    told = facts | {"arms": [each | {"baseline": baseline} for each in facts["arms"]]}
    rows = {
        row["slice"]: row
        for row in compare_arms(told, table)
        if (row["holdout"], row["action"], row["figure"], row["arm"])
        == ("in_window", "save", "log_loss", arm)
    }
    tiers = text[text.index("By tier") : text.index("by epoch, cold")]
    for piece in SLICES:
        mean = re.search(rf'data-mean="{piece}">([^<]*)<', tiers)
        difference = re.search(rf'data-difference="{piece}">([^<]*)<', tiers)
        assert mean[1] == formatting.figure(rows[piece]["mean"])
        assert difference[1] == formatting.signed(rows[piece]["difference"])
        assert rows[piece]["words"] in tiers
    assert f"log loss on in_window {formatting.figure(rows['pooled']['mean'])}" in text
    assert f"against {baseline}" in text


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no browser")
def test_a_browser_offers_the_datasets_and_the_studies_of_the_chosen_one(study, tmp_path):
    names = {"news: Timing": "news", "feed: Timing": "feed", "feed: Leak": "feed"}
    page = tmp_path / "explorer.html"
    text = render_explorer([(name, *study) for name in names], datasets=names)
    page.write_text(text, encoding="utf-8")
    form = re.search(r"<form.*?</form>", shown(page, tmp_path, study="feed: Leak"), re.DOTALL)[0]
    assert re.findall(r"<span>(dataset|study)</span>", form) == ["dataset", "study"]
    assert [">news<" in form, ">feed<" in form, ">Timing<" in form, ">Leak<" in form] == [True] * 4
    alone = re.search(r"<form.*?</form>", shown(page, tmp_path, study="news: Timing"), re.DOTALL)[0]
    assert re.findall(r"<span>(dataset|study)</span>", alone) == ["dataset"]
    # As if the reader changed the dataset: the study of the same title follows.
    page.write_text(
        text.replace(
            "</body>",
            "<script>const menu = document.querySelector('#explorer-app select');"
            "menu.value = 'feed'; menu.dispatchEvent(new Event('change'));</script></body>",
        ),
        encoding="utf-8",
    )
    form = re.search(r"<form.*?</form>", shown(page, tmp_path, study="news: Timing"), re.DOTALL)[0]
    assert re.findall(r'<option value="feed" selected="">', form)
    assert re.findall(r'selected="">Timing<', form)
