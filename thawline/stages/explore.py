"""The explorer over studies that lie in folders: one study's, or those of all experiments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from thawline.errors import ConfigError, DataError
from thawline.study.experiments import EXPERIMENTS
from thawline.study.explorer import render_explorer
from thawline.study.measured import MEASURED
from thawline.study.report import REPORT
from thawline.study.trials import FACTS, read_study


@dataclass
class Shelf:
    """What lies in some folders, as `render_explorer` takes it."""

    studies: list[tuple[str, dict[str, Any], pa.Table]] = field(default_factory=list)
    pages: dict[str, str] = field(default_factory=dict)
    questions: dict[str, str] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    datasets: dict[str, str] = field(default_factory=dict)

    def add(self, folder: Path, beside: Path, dataset: str = "") -> None:
        """Adds what a study or an experiment left in a folder, or all experiments in its own.

        Args:
            folder: As `thawline study --out` or `thawline experiment --out` had it.
            beside: The folder of the page that will lead to them.
            dataset: Its label, where there are several.

        Raises:
            DataError: A study that cannot be read.
        """
        if (folder / FACTS).exists():
            self._study(folder, beside, dataset)
        elif (folder / MEASURED).exists() and folder.name in EXPERIMENTS:
            experiment = EXPERIMENTS[folder.name]
            title = _named(dataset, experiment.title)
            self.others[title] = _way(folder / REPORT, beside)
            self.questions[title] = experiment.question
        else:
            for own in (folder / name for name in EXPERIMENTS if (folder / name).is_dir()):
                self.add(own, beside, dataset)

    def render(self, title: str = "Experiments") -> str:
        """The page."""
        return render_explorer(
            self.studies,
            title=title,
            pages=self.pages,
            questions=self.questions,
            others=self.others,
            datasets=self.datasets,
        )

    def __bool__(self) -> bool:
        return bool(self.studies or self.others)

    def _study(self, folder: Path, beside: Path, dataset: str) -> None:
        facts, table = read_study(folder)
        experiment = EXPERIMENTS.get(facts.get("experiment", ""))
        name = _named(dataset, experiment.title if experiment else "Study")
        self.studies.append((name, facts, table))
        self.pages[name] = _way(folder / REPORT, beside)
        self.datasets[name] = dataset
        if experiment:
            self.questions[name] = experiment.question


def run(folders: Mapping[str, str | Path], out: str | Path) -> int:
    """Writes one explorer over the studies of several folders, each a dataset to choose.

    Args:
        folders: By label: a study's folder, or that of the experiments of a config.
        out: The HTML file.

    Returns:
        How many studies it shows.

    Raises:
        DataError: A folder without a study, or a study that cannot be read.
    """
    shelf, out = Shelf(), Path(out)
    for label, folder in folders.items():
        before = len(shelf.studies)
        shelf.add(Path(folder), out.parent, label)
        if len(shelf.studies) == before:
            raise DataError(
                f"{folder} holds no study",
                f"name the folder of `thawline study` or `thawline experiment`; {FACTS} is in it "
                "or in its subfolders",
            )
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    partial.write_text(shelf.render("Studies"), encoding="utf-8")
    partial.rename(out)
    return len(shelf.studies)


def labelled(texts: list[str]) -> dict[str, Path]:
    """The folders of `LABEL=FOLDER` or `FOLDER` arguments; the latter are called by their path.

    Raises:
        ConfigError: Two of one label.
    """
    found: dict[str, Path] = {}
    for text in texts:
        label, equals, folder = text.partition("=")
        if not equals:
            folder, label = text, Path(text).as_posix()
        if label in found:
            raise ConfigError(f"two folders are called {label!r}", "write LABEL=FOLDER")
        found[label] = Path(folder)
    return found


def _named(dataset: str, title: str) -> str:
    return f"{dataset}: {title}" if dataset else title


def _way(page: Path, beside: Path) -> str:
    return Path(os.path.relpath(page, beside)).as_posix()
