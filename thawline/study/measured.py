"""The page of an experiment that measures something and trains nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import pyarrow as pa

from thawline.study.experiments.base import Experiment

MEASURED = "measured.json"
"""Beside the page: what was measured."""


def render_measured(experiment: Experiment, facts: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The page, self-contained, and what it says in words.

    Args:
        experiment: Has a page of its own.
        facts: `{"experiment": its name, "measured": what its `measure` gave}`.
    """
    sections = experiment.page(facts, pa.table({}), []) if experiment.page else []
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.ChoiceLoader(
            [
                jinja2.PackageLoader("thawline", "study"),
                jinja2.PackageLoader("thawline", "evaluation"),
            ]
        ),
    )
    template = environment.get_template("measured.html.j2")
    text = template.render(experiment=experiment, sections=sections)
    return text, [sentence for section in sections for sentence in section.words]


def write_measured(folder: Path, facts: Mapping[str, Any]) -> None:
    """Writes `measured.json`, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{MEASURED}.partial"
    partial.write_text(json.dumps(facts, indent=2), encoding="utf-8")
    partial.rename(folder / MEASURED)
