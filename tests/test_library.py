"""The package as a library: its public names, and the example of a loop of one's own."""

import subprocess
import sys
from pathlib import Path

import pytest

import thawline

EXAMPLE = Path(__file__).parent.parent / "examples" / "own_loop.py"


@pytest.mark.parametrize("name", thawline.__all__)
def test_every_public_name_is_there_and_documented(name):
    assert getattr(thawline, name).__doc__


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = thawline.Trainer


def test_the_package_and_its_config_load_no_torch():
    code = "import sys, thawline, thawline.config; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert shown.stdout == "False\n"


def test_the_example_of_a_loop_of_one_s_own_runs():
    shown = subprocess.run(
        [sys.executable, EXAMPLE], capture_output=True, text=True, check=True, timeout=120
    )
    lines = shown.stdout.splitlines()

    assert [line.rpartition(": ")[2] for line in lines] == ["False", "False", "True"]
    assert sum(1 for _ in EXAMPLE.open()) <= 40
