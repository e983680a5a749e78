"""One page over the studies of several folders: the reader chooses the dataset too."""

import json
import re
from pathlib import Path

import pytest
from experiment_studies import found
from typer.testing import CliRunner

from thawline.cli import app
from thawline.config import parse_config
from thawline.errors import ConfigError, DataError
from thawline.stages.explore import labelled, run
from thawline.study.experiments import EXPERIMENTS
from thawline.study.trials import write_study

CONFIG = parse_config("simulate: {}")


def store(folder, base, *names):
    """The folder of experiments whose AUCs begin with `base`."""
    for name in names:
        facts, table, _ = found(
            EXPERIMENTS[name], CONFIG, lambda arm, seed, piece, figure: base + 0.01 * seed
        )
        write_study(folder / name, facts, table)
    return folder


def data_of(page):
    text = page.read_text(encoding="utf-8")
    (own,) = re.findall(r'id="explorer-data">(.*?)</script>', text)
    return json.loads(own)["studies"]


def test_each_folder_is_a_dataset_whose_studies_keep_their_figures_and_pages(tmp_path):
    news = store(tmp_path / "news" / "experiments", 0.6, "timing", "consistency")
    feed = store(tmp_path / "feed" / "experiments", 0.7, "timing")
    measured = news / "small-tables"
    measured.mkdir()
    (measured / "measured.json").write_text("{}")
    out = tmp_path / "pages" / "explorer.html"
    result = CliRunner().invoke(
        app, ["explore", f"news={news}", f"feed={feed / 'timing'}", "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    studies = data_of(out)
    timing, consistency = EXPERIMENTS["timing"].title, EXPERIMENTS["consistency"].title
    assert [(each["dataset"], each["title"]) for each in studies] == [
        ("news", timing),
        ("news", consistency),
        ("feed", timing),
    ]
    assert [each["name"] for each in studies] == [
        f"news: {timing}",
        f"news: {consistency}",
        f"feed: {timing}",
    ]
    firsts = [each["values"]["next|save|auc"]["pooled"][0][0] for each in studies]
    assert firsts == [0.6, 0.6, 0.7]
    assert [each["href"] for each in studies] == [
        "../news/experiments/timing/study.html",
        "../news/experiments/consistency/study.html",
        "../feed/experiments/timing/study.html",
    ]
    assert '<a href="../news/experiments/small-tables/study.html">' in out.read_text()


def test_a_folder_without_a_study_and_a_label_that_comes_twice_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"empty holds no study"):
        run({"one": tmp_path / "empty"}, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
    assert labelled(["runs/a", "b=runs/c"]) == {"runs/a": Path("runs/a"), "b": Path("runs/c")}
    with pytest.raises(ConfigError, match="two folders are called 'x'"):
        labelled(["x=a", "x=b"])
