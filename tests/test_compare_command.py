"""`thawline compare` on files of scores and evaluation folders."""

import json
from dataclasses import replace

import pytest
from evaluations import ITEMS, evaluation, scored

from thawline import cli
from thawline.evaluation.score_file import write_scores
from thawline.study.statistics import paired


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    return evaluation(root / "worse", 1.5), evaluation(root / "better", 0.3)


@pytest.fixture
def compare(monkeypatch, capfd):
    """Runs the command: exit code, standard output and standard error."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["thawline", "compare", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "80")
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


SLICES = ["pooled", "head", "torso", "tail", "cold"]


def figures(out):
    """Titles of the tables."""
    return [line.strip() for line in out.splitlines() if line.startswith("save ")]


def test_two_evaluations_are_compared_and_the_table_says_by_how_much(compare, pair):
    code, out, err = compare(*pair)
    assert code == 0, err
    assert "next: B minus A with 95 % intervals, 400 requests of 80 users" in out
    assert figures(out) == ["save auc", "save log_loss", "save calibration"]
    lines = [line.split() for line in out.splitlines()]
    assert [line[0] for line in lines if line and line[0] in SLICES] == 3 * SLICES
    a, b, difference = map(float, next(line for line in lines if line[:1] == ["pooled"])[1:4])
    assert 0 < difference == pytest.approx(b - a, abs=1.1e-4)
    assert all(len(line) <= 80 for line in out.splitlines() if not line.startswith(("A:", "B:")))


def test_the_json_holds_every_figure_and_either_kind_of_name_gives_the_same(compare, pair):
    code, out, err = compare(*pair, "--json", "--resamples", 100)
    assert code == 0, err
    tree = json.loads(out)
    assert (tree["by"], tree["notes"]) == ("users", [])
    rows = tree["rows"]["next"]
    assert len(rows) == 5 * 9
    first = rows[0]
    assert first["difference"] == first["b"] - first["a"] > 0
    assert first["low"] < first["difference"] < first["high"]
    files = [folder / "scores" / "next.parquet" for folder in pair]
    assert json.loads(compare(*files, "--json", "--resamples", 100)[1])["rows"] == tree["rows"]


def test_figures_may_be_chosen(compare, pair):
    _, out, _ = compare(*pair, "-f", "mrr", "--resamples", 100)
    assert figures(out) == ["save mrr"]
    code, _, err = compare(*pair, "-f", "hits", "--resamples", 100)
    assert code == 2
    assert "there is no 'hits'" in err
    assert "hit@3" in err


@pytest.mark.parametrize(
    ("suffix", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("html", b"<!doctype html>")]
)
def test_the_differences_are_drawn(compare, pair, tmp_path, suffix, start):
    path = tmp_path / "plots" / f"auc.{suffix}"
    code, out, err = compare(*pair, "-f", "auc", "--resamples", 100, "--plot", path)
    assert code == 0, err
    assert f"plot: {path}" in out
    drawn = path.read_bytes()
    assert drawn.startswith(start)
    assert len(list(path.parent.iterdir())) == 1
    if suffix != "png":
        text = drawn.decode()
        assert "next: save auc" in text
        assert ">cold<" in text
        assert "http" not in text.partition("<g id")[2].replace("http://www.w3.org", "")


def test_requests_that_do_not_pair_are_named(compare, pair, tmp_path):
    fewer = scored(0.3)
    labels = fewer.labels.copy()
    labels[:5] = 1 - labels[:5]
    path = tmp_path / "other.parquet"
    write_scores(path, replace(fewer, labels=labels), ITEMS, model="", data_version="")
    code, out, _ = compare(pair[0] / "scores" / "next.parquet", path, "--resamples", 100)
    assert code == 0
    assert "note: next: 1 requests have other labels (request_id 0)" in out


def seeds(root, name, aucs, first_seed=0):
    for number, auc in enumerate(aucs):
        evaluation(root / f"{name}-{number}", 1.0, seed=first_seed + number, auc=auc, scores=False)
    return [root / f"{name}-{number}" for number in range(len(aucs))]


def test_runs_are_paired_by_seed_whatever_their_order(compare, tmp_path):
    a = seeds(tmp_path, "a", [0.60, 0.61, 0.62, None])
    b = seeds(tmp_path, "b", [0.62, 0.62, 0.65, 0.70])
    code, out, err = compare(*a, "vs", *b[::-1], "--json")
    assert code == 0, err
    tree = json.loads(out)
    assert (tree["by"], tree["notes"]) == ("seeds", [])
    first = tree["rows"]["next"][0]
    # The fourth pair lacks a figure on one side.
    wanted = paired([0.02, 0.01, 0.03])
    assert first["n"] == 3
    assert first["difference"] == pytest.approx(0.02)
    for key in ("sd", "low", "high", "p_value", "smallest_effect"):
        assert first[key] == pytest.approx(getattr(wanted, key))
    assert (first["p_value"], first["agreement"], first["exact"]) == (0.25, 1.0, True)
    assert first["pairs_needed"] >= 4
    undefined = tree["rows"]["next"][1]
    assert (undefined["n"], undefined["difference"]) == (0, None)
    globs = compare("--a", tmp_path / "a-*", "--b", tmp_path / "b-*", "--json")
    assert json.loads(globs[1])["rows"] == tree["rows"]
    table = compare(*a, "vs", *b, "-f", "auc")[1]
    line = next(line.split() for line in table.splitlines() if "pooled" in line)
    assert line[1:4] == ["0.6100", "0.6300", "+0.0200"]
    assert line[-4:] == ["3", "100%", "0.250", str(first["pairs_needed"])]


def test_other_seeds_and_other_data_are_said(compare, tmp_path):
    a = seeds(tmp_path, "a", [0.6, 0.6])
    b = seeds(tmp_path, "b", [0.7, 0.6], first_seed=5)
    notes = json.loads(compare(*a, "vs", *b, "--json")[1])["notes"]
    assert notes == ["the seeds of the two sides are not the same: runs are paired in order"]
    other = evaluation(tmp_path / "other", 1.0, data="d2", auc=0.5, scores=False)
    notes = json.loads(compare(a[0], b[0], "vs", a[1], other, "--json")[1])["notes"]
    assert notes[-1] == f"{b[0]} and {other} were evaluated on other data"


def test_scores_stand_in_for_an_evaluations_figures(compare, pair, tmp_path):
    files = [folder / "scores" / "next.parquet" for folder in pair]
    tree = json.loads(compare(files[0], files[0], "vs", files[1], files[1], "--json")[1])
    by_user = json.loads(compare(*files, "--json", "--resamples", 100)[1])
    for seed, user in zip(tree["rows"]["next"], by_user["rows"]["next"], strict=True):
        assert seed["difference"] == pytest.approx(user["difference"])
        assert (seed["sd"], seed["n"]) == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "compare got 0 models"),
        (["{a}"], "compare got 1 models"),
        (["{a}", "{b}", "--a", "{a}"], "compare got 2 models beside --a and --b"),
        (["{a}", "{b}", "vs", "{a}"], "2 models are to be compared with 1"),
        (["{a}", "gone"], "'gone' is neither an evaluation folder"),
        (["--a", "{a}", "--b", "none-*"], "nothing matches none-*"),
        (["{a}", "gone.parquet"], "gone.parquet cannot be read"),
        (["{a}", "{empty}"], "holds no scores"),
        (["{a}", "{broken}"], "evaluation.json cannot be read"),
        (["{a}", "{b}", "--plot", "x.gif"], "no picture ends so"),
    ],
)
def test_what_cannot_be_compared_is_refused(compare, pair, tmp_path, arguments, message):
    empty = evaluation(tmp_path / "empty", 1.0, scores=False)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "evaluation.json").write_text("{}")
    names = {"a": pair[0], "b": pair[1], "empty": empty, "broken": broken}
    code, _, err = compare(*(argument.format(**names) for argument in arguments))
    assert code == 2
    # The terminal breaks lines wherever it must.
    assert message.replace(" ", "") in "".join(err.split())
