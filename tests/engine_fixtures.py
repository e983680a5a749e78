"""Spark within the tests' process.

A test module takes the fixture by `pytest_plugins = ["engine_fixtures"]`.
"""

import shutil

import pytest
from engine_helpers import SPARK

from thawline.config import Runtime, Windows
from thawline.data.engine import open_engine


@pytest.fixture(scope="session")
def spark(tmp_path_factory):
    """Spark in this process; engines that are opened while it runs take it, and leave it on."""
    pytest.importorskip("pyspark", reason="pyspark is not installed: pip install 'thawline[spark]'")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java 17, and there is no java on the PATH")
    scratch = tmp_path_factory.mktemp("spark")
    windows = Windows(engine="spark", spark=SPARK, memory_limit="1GB")
    with open_engine(windows, Runtime(threads=2), scratch) as engine:
        yield engine


@pytest.fixture(
    params=["duckdb", pytest.param("spark", marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def engine(request):
    """The name of each engine in turn, ready to be opened."""
    if request.param == "spark":
        request.getfixturevalue("spark")
    return request.param
