"""The explorer: one interactive page over one study or several, that needs no network.

Its figures are those of `explorer_data`, embedded as JSON; its script only chooses among them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import pyarrow as pa
from markupsafe import Markup

from thawline.evaluation import formatting
from thawline.study.comparison import compare_arms
from thawline.study.explorer_data import study_data

INDEX = "index.html"

Tree = Mapping[str, Any]


def render_explorer(
    studies: Sequence[tuple[str, Tree, pa.Table]],
    *,
    title: str = "Experiments",
    pages: Mapping[str, str] | None = None,
    questions: Mapping[str, str] | None = None,
    others: Mapping[str, str] | None = None,
    datasets: Mapping[str, str] | None = None,
) -> str:
    """The front page of several studies, self-contained.

    Without JavaScript it shows a table for each study instead.

    Args:
        studies: Each with its name (its title for a reader), `study.json` and `trials.parquet`.
        title: Of the page.
        pages: By name of a study, where its own page lies from this one.
        questions: By name of a study or of another page, what it asks.
        others: Further pages without a study, by name.
        datasets: By name of a study, what it was run on. Names then are `<dataset>: <title>`, and a
            reader who changes the dataset comes to the study of the same title.
    """
    pages, questions = pages or {}, questions or {}
    return (
        _environment()
        .get_template("explorer.html.j2")
        .render(
            title=title,
            explorer=explorer_section(studies, pages=pages, questions=questions, datasets=datasets),
            others=others or {},
            questions=questions,
            studies=[
                {
                    "name": name,
                    "page": pages.get(name),
                    "question": questions.get(name, ""),
                    "what": f"{facts['action']} {formatting.label(facts['metric'])} on "
                    f"{facts['holdout']}, all candidates",
                    "rows": _main(facts, table),
                }
                for name, facts, table in studies
            ],
        )
    )


def explorer_section(
    studies: Sequence[tuple[str, Tree, pa.Table]],
    *,
    pages: Mapping[str, str] | None = None,
    questions: Mapping[str, str] | None = None,
    datasets: Mapping[str, str] | None = None,
) -> Markup:
    """The explorer itself, to stand in a page that has `report.style.j2` and `explorer.style.j2`.

    Args:
        studies: As of `render_explorer`.
        pages: As of `render_explorer`.
        questions: As of `render_explorer`.
        datasets: As of `render_explorer`.
    """
    pages, questions, datasets = pages or {}, questions or {}, datasets or {}
    found = [
        study_data(
            name,
            facts,
            table,
            href=pages.get(name),
            question=questions.get(name, ""),
            dataset=datasets.get(name, ""),
        )
        for name, facts, table in studies
    ]
    data = embedded({"studies": [each for each in found if each["figures"]]})
    text = _environment().get_template("explorer.section.j2").render(data=data)
    # Safe: the template has nothing of its own, and `embedded` leaves nothing that HTML would read.
    return Markup(text)  # noqa: S704


def embedded(tree: Any) -> Markup:
    """JSON that may stand in a `<script>`: no text of a config can end it or open another."""
    text = json.dumps(tree, separators=(",", ":"), allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    # Safe: nothing is left that HTML would read.
    return Markup(text)  # noqa: S704


def _main(facts: Tree, table: pa.Table) -> list[dict[str, str]]:
    """The study's own metric, an arm or a contrast a row."""
    key = (facts["holdout"], facts["action"], "pooled", facts["metric"])
    return [
        {
            "arm": row["arm"],
            # A contrast is a difference itself, and has no mean beside it.
            "mean": formatting.DASH if row["contrast"] else formatting.figure(row["mean"]),
            "sd": formatting.DASH if row["contrast"] else formatting.figure(row["sd"]),
            "difference": formatting.signed(row.get("difference"))
            if row["baseline"] or row["contrast"]
            else formatting.DASH,
            "words": row.get("words") or "",
        }
        for row in compare_arms(facts, table)
        if (row["holdout"], row["action"], row["slice"], row["figure"]) == key
    ]


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
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
