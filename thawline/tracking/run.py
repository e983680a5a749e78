"""An open MLflow run: params, metrics, tags and files go in."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from thawline.config import Config
from thawline.errors import TrackingError
from thawline.tracking.server import explained

MAX_PARAM_LENGTH = 6_000
PARAMS_PER_CALL = 100
METRICS_PER_CALL = 1_000


@dataclass(frozen=True)
class Run:
    """A run that is open for logging."""

    run_id: str
    pipeline_run_id: str
    """The parent's id; the run's own where it has no parent."""
    config: Config = field(repr=False)
    client: MlflowClient = field(repr=False)

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Logs params; nested mappings become dotted keys, long values are cut.

        The same value may be logged again, as a retried step does. `data_version` becomes the tag
        `thawline.data_version` too, to search by.

        Raises:
            TrackingError: A param that was logged with another value, or the server's refusal.
        """
        values = {key: _cut(str(value)) for key, value in _flat(params, ".")}
        with explained(self.config, "reading params"):
            logged = self.client.get_run(self.run_id).data.params
        for key, value in values.items():
            if logged.get(key, value) != value:
                raise TrackingError(
                    f"the param {key} of the run {self.run_id} is {logged[key]!r} already and "
                    f"cannot become {value!r}",
                    "log it in a new run: params never change",
                )
        new = [Param(key, value) for key, value in values.items() if key not in logged]
        with explained(self.config, "logging params"):
            for start in range(0, len(new), PARAMS_PER_CALL):
                self.client.log_batch(self.run_id, params=new[start : start + PARAMS_PER_CALL])
        if "data_version" in values:
            self.set_tags({"thawline.data_version": values["data_version"]})

    def log_metrics(self, metrics: Mapping[str, Any], step: int = 0) -> None:
        """Logs metrics; nested mappings become keys with `/`, None (undefined) is left out.

        MLflow knows no `@` in a key: `hit@3` is logged as `hit_at_3`.

        Raises:
            TrackingError: A value that is NaN or infinite (MLflow would store another number), or
                the server's refusal. Nothing is logged then.
        """
        now = int(time.time() * 1000)
        entries = []
        for key, value in _flat(metrics, "/"):
            if value is None:
                continue
            if not math.isfinite(value):
                raise TrackingError(
                    f"the metric {key} at step {step} is {float(value)}",
                    "an undefined metric must be None; a NaN from training means it diverged: "
                    "lower the learning rates",
                )
            entries.append(Metric(key.replace("@", "_at_"), float(value), now, step))
        with explained(self.config, "logging metrics"):
            for start in range(0, len(entries), METRICS_PER_CALL):
                self.client.log_batch(
                    self.run_id, metrics=entries[start : start + METRICS_PER_CALL]
                )

    def log_artifact(self, path: str | Path, folder: str = "") -> None:
        """Uploads a file, or a folder with all that is in it, into `folder` of the artifacts.

        Raises:
            TrackingError: No such path, or the server's refusal.
        """
        if not Path(path).exists():
            raise TrackingError(f"the artifact {path} does not exist", "check the path")
        with explained(self.config, f"uploading {path}"):
            self.client.log_artifact(self.run_id, str(path), folder or None)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Sets tags; an older value is replaced.

        Raises:
            TrackingError: The server's refusal.
        """
        with explained(self.config, "setting tags"):
            for key, value in tags.items():
                self.client.set_tag(self.run_id, key, value)


def _flat(tree: Mapping[str, Any], separator: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, separator, f"{prefix}{key}{separator}")
        else:
            yield f"{prefix}{key}", value


def _cut(text: str) -> str:
    return text if len(text) <= MAX_PARAM_LENGTH else text[: MAX_PARAM_LENGTH - 1] + "…"
