"""The arrows of imports: who may know whom."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LAYERS = [
    {"pipelines"},
    {"components"},
    {"thawline.cli", "thawline.terminal"},
    {"thawline.stages"},
    {"thawline.training", "thawline.evaluation", "thawline.tracking", "thawline.study"},
    {"thawline.model", "thawline.tables", "thawline.data", "thawline.theory"},
    {
        "thawline.config",
        "thawline.errors",
        "thawline.folders",
        "thawline.logs",
        "thawline.progress",
    },
]
"""Each layer may import itself and those below it."""

OWNERS = {
    "kfp": ("components", "pipelines"),
    "mlflow": ("thawline/tracking",),
    "ibis": ("thawline/data",),
    "duckdb": ("thawline/data",),
    "pyspark": ("thawline/data/spark.py",),
    "torchrec": ("thawline/tables/sharded.py",),
    "kubernetes": (
        "thawline/stages/trainjob/cluster.py",
        "thawline/stages/doctor/cluster.py",
        "pipelines/run_logs.py",
    ),
    "pickle": (),
}
"""Packages that only these places import."""


def sources():
    for package in ("thawline", "components", "pipelines"):
        yield from sorted((ROOT / package).rglob("*.py"))


def imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer(module):
    for index, names in enumerate(LAYERS):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return index
    return None


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_every_module_has_a_layer():
    free = {"thawline.__init__", "thawline.__main__"}
    assert [m for m in map(module_of, sources()) if layer(m) is None and m not in free] == []


@pytest.mark.parametrize("path", list(sources()), ids=module_of)
def test_imports_point_down(path):
    own = layer(module_of(path))
    layers = {name: layer(name) for name in imported(path)}
    upward = [n for n, at in layers.items() if own is not None and at is not None and at < own]
    assert upward == []


@pytest.mark.parametrize("package", OWNERS)
def test_a_package_is_imported_in_its_own_rooms_only(package):
    owners = tuple(str(ROOT / owner) for owner in OWNERS[package])
    strangers = [
        module_of(path)
        for path in sources()
        if any(name.split(".")[0] == package for name in imported(path))
        and not (owners and str(path).startswith(owners))
    ]
    assert strangers == []
