"""The package as a library: its public names, its page, and the example of a loop of one's own."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import thawline

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "own_loop.py"
PAGE = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")

HEAVY = ("torch", "mlflow", "ibis", "duckdb", "pandas", "matplotlib", "sklearn", "pyarrow")


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page, flags=re.S | re.M)


@pytest.mark.parametrize("name", thawline.__all__)
def test_every_public_name_is_there_and_documented(name):
    assert getattr(thawline, name).__doc__
    assert f"`{name}`" in PAGE
    assert name in dir(thawline)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = thawline.Trainer


def test_reading_a_config_loads_nothing_heavy():
    code = (
        "import sys, thawline\n"
        "thawline.load_config('examples/feed.yaml', ['finetune.epochs=2'])\n"
        "thawline.Config(simulate={}), thawline.ThawlineError\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )

    assert shown.stdout == "[]\n"


def test_the_page_calls_the_stages_as_the_executed_notebook_does():
    notebook = nbformat.read(ROOT / "examples" / "library.ipynb", as_version=4)
    executed = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    lines = blocks(PAGE)[0].splitlines()
    calls = [line for line in lines if re.match(r"(verdict = )?tl\.", line)]

    assert len(calls) == 4
    assert [line for line in calls if line not in executed] == []
    assert len([line for line in lines if line]) <= 15


def test_the_config_that_the_page_makes_in_python_is_one():
    config = eval(blocks(PAGE)[1].removeprefix("config = "), {"tl": thawline})  # noqa: S307

    assert config.events.columns.item_id == "article"
    assert config.finetune.recipe == "window(2, 1)"


def test_the_example_of_a_loop_of_one_s_own_runs():
    shown = subprocess.run(
        [sys.executable, EXAMPLE], capture_output=True, text=True, check=True, timeout=120
    )
    lines = shown.stdout.splitlines()

    assert [line.rpartition(": ")[2] for line in lines] == ["False", "False", "True"]
    assert sum(1 for _ in EXAMPLE.open()) <= 40
