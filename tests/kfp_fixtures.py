"""Kubeflow's API on loopback, and the command that speaks to it.

A test module takes the fixtures by `pytest_plugins = ["kfp_fixtures"]`.
"""

import os

import pytest
from fake_kfp import FakeKfp, serving

from pipelines.connection import Connection
from pipelines.kfp_client import Kfp
from thawline import cli


@pytest.fixture
def kfp():
    return FakeKfp()


@pytest.fixture
def endpoint(kfp, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("KFP_", "KF_PIPELINES_"))]:
        monkeypatch.delenv(name)
    with serving(kfp) as address:
        monkeypatch.setenv("KFP_ENDPOINT", address)
        yield address


@pytest.fixture
def client(endpoint):
    return Kfp(Connection(endpoint))


@pytest.fixture
def invoke(monkeypatch, capsys):
    """Runs the command as a shell would: exit code, standard output, standard error."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["thawline", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
