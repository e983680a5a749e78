"""Designed experiments as studies in one shared store, and the front page over all of them.

```
experiments/
  datasets/ tables/ trials/ ...   the store: what one experiment has computed serves the others
  <name>/study.html  study.json  trials.parquet   (measured.json where nothing is trained)
  index.html                      the explorer over the experiments that were run
```
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thawline.config import Config
from thawline.errors import ConfigError, DataError, ThawlineError
from thawline.stages import study
from thawline.stages.explore import Shelf
from thawline.stages.study_processes import Runner
from thawline.stages.study_report import Outcome
from thawline.study.design import Design, data_key
from thawline.study.experiments import EXPERIMENTS, Experiment
from thawline.study.explorer import INDEX
from thawline.study.measured import render_measured, write_measured
from thawline.study.report import REPORT

Progress = Callable[[Experiment], AbstractContextManager[study.Show]]
"""Gives what is told of an experiment's changes while it runs."""


@dataclass(frozen=True)
class Ran:
    """What became of one experiment of several."""

    experiment: Experiment
    outcome: Outcome | None = None
    left_out: str = ""
    """Why the config cannot answer its question."""
    error: ThawlineError | None = None

    @property
    def failures(self) -> int:
        """Trials that failed."""
        return 0 if self.outcome is None else len(failures_of(self.experiment, self.outcome))


def failures_of(experiment: Experiment, outcome: Outcome) -> list[dict[str, Any]]:
    """The trials that failed, without those whose error answers the question."""
    return [trial for trial in outcome.failed if not experiment.answers(trial["error"] or "")]


def find(name: str) -> Experiment:
    """The experiment of a name.

    Raises:
        ConfigError: There is none.
    """
    if name not in EXPERIMENTS:
        near = difflib.get_close_matches(name, EXPERIMENTS, n=1)
        raise ConfigError(
            f"there is no experiment {name!r}",
            f"did you mean {near[0]}?" if near else f"choose one of {', '.join(EXPERIMENTS)}",
        )
    return EXPERIMENTS[name]


def folder_of(config: Config, out: str | Path | None = None) -> Path:
    """Where the experiments of a config are: `out`, or `<workdir>/experiments`."""
    return Path(out) if out is not None else Path(config.workdir) / "experiments"


def why_not(
    config: Config, experiment: Experiment, dataset: str | Path | None = None
) -> str | None:
    """Why a config cannot answer an experiment's question; None: it can.

    Args:
        config: The user's.
        experiment: Is not run.
        dataset: The dataset that was given, if one was.

    Raises:
        ConfigError: The config itself cannot be.
    """
    why = experiment.needs(config)
    if why is None and dataset is not None and experiment.measure is None:
        laid_out = experiment.lay_out(config)
        own = data_key(config)
        if any(data_key(trial.config) != own for trial in Design.of(laid_out).trials()):
            why = "it needs datasets of its own; leave out --dataset, so that they are built"
    return why


def run(
    config: Config,
    name: str,
    out: str | Path | None = None,
    *,
    dataset: str | Path | None = None,
    runner: Runner | None = None,
    show: study.Show = lambda changed, standings: None,
) -> Outcome:
    """Runs one experiment and makes its page and the front page.

    What is finished in the store is not run again, whichever experiment has run it.

    Args:
        config: Its `study` gives seeds, jobs, metric and what the arms are crossed with
            (`study.grid`); its own arms count for nothing here.
        name: In `EXPERIMENTS`.
        out: The folder of all experiments; see `folder_of`.
        dataset: A dataset folder. None: what is needed is built.
        runner: What runs one trial. None: a process for each.
        show: Told of each change, maybe in another thread.

    Raises:
        ConfigError: No such experiment, or one whose question the config cannot answer.
        ThawlineError: See `study.run`.
    """
    experiment, store = find(name), folder_of(config, out)
    why = why_not(config, experiment, dataset)
    if why is not None:
        raise ConfigError(f"the experiment {name} cannot run: {why}", "see the experiment's --help")
    if experiment.measure is not None:
        return _measure(config, experiment, experiment.measure, store)
    try:
        return study.run(
            experiment.lay_out(config),
            store,
            report_to=store / name,
            facts={"experiment": name},
            dataset=dataset,
            runner=runner,
            show=show,
        )
    finally:
        write_index(store)


def _measure(
    config: Config, experiment: Experiment, measure: Callable[[Config], Any], store: Path
) -> Outcome:
    """Measures what an experiment that trains nothing asks, and makes its page."""
    folder = store / experiment.name
    facts = {"experiment": experiment.name, "measured": measure(config)}
    write_measured(folder, facts)
    page, words = render_measured(experiment, facts)
    (folder / REPORT).write_text(page, encoding="utf-8")
    write_index(store)
    return Outcome(folder, {**facts, "words": words, "trials": []}, [])


def run_all(
    config: Config,
    out: str | Path | None = None,
    *,
    dataset: str | Path | None = None,
    runner: Runner | None = None,
    progress: Progress = lambda experiment: nullcontext(lambda changed, standings: None),
) -> Iterator[Ran]:
    """Runs every experiment whose question the config can answer, and yields what became of each.

    One that fails stops no other.

    Args:
        config: As of `run`, like what follows.
        out: As of `run`.
        dataset: As of `run`.
        runner: As of `run`.
        progress: Entered for each experiment.
    """
    for experiment in EXPERIMENTS.values():
        why = why_not(config, experiment, dataset)
        if why is not None:
            yield Ran(experiment, left_out=why)
            continue
        try:
            with progress(experiment) as show:
                outcome = run(
                    config, experiment.name, out, dataset=dataset, runner=runner, show=show
                )
        except ThawlineError as error:
            yield Ran(experiment, error=error)
        else:
            yield Ran(experiment, outcome)


def write_index(store: Path) -> Path | None:
    """Makes the front page over the experiments that were run; None where there is none."""
    shelf = Shelf()
    for name in EXPERIMENTS:
        # One that a kill left half written is made anew when it is run again.
        with suppress(DataError):
            shelf.add(store / name, store)
    if not shelf:
        return None
    # Another command may write it at the same time.
    partial = store / f".{INDEX}.{os.getpid()}.partial"
    partial.write_text(shelf.render(), encoding="utf-8")
    partial.rename(store / INDEX)
    return store / INDEX
