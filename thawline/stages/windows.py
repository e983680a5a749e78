"""The windows stage: a log (or the simulator's settings) in, a dataset folder out."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from thawline import logs
from thawline.config import Config
from thawline.data.audit import AUDIT_FILE, audited
from thawline.data.inputs import local_inputs
from thawline.data.manifest import Dataset, Manifest
from thawline.data.windows import build_dataset, inputs_version, unchanged
from thawline.folders import resumable_folder
from thawline.tracking.fetch import REGISTERED, fetch_catalog
from thawline.tracking.runs import stage_run


def run(config: Config, out: str | Path, *, parent_run_id: str = "") -> Manifest:
    """Builds the dataset folder `out` and audits it; a simulated log lies in its folder `source`.

    Nothing is done where the dataset in `out` is the one that would be built. Where a build was
    killed, the next one goes on with the days that it had finished.

    Args:
        config: The whole config; see `build_dataset` for what matters. Remote inputs are fetched,
            and so is the catalog of a registered model that `windows.previous` names.
        out: What stood there before is replaced once the new dataset is complete; days of it that
            are still right are taken over.
        parent_run_id: The MLflow run of the pipeline.

    Raises:
        BusyError: Another process builds the same folder.
        DataError: A log that cannot be read or used, a window without data, or an error of the
            audit that `audit.waive` does not name; the dataset and its `audit.json` stay then.
        TrackingError: MLflow cannot be reached.
    """
    with (
        stage_run(config, "windows", parent_run_id) as tracked,
        _with_registered(config) as known,
        local_inputs(known, Path(out)) as local,
    ):
        inputs = inputs_version(local)
        manifest = unchanged(local, Path(out), inputs)
        if manifest is None:
            with resumable_folder(out) as folder, _status() as show:
                # A build may have been killed between its last file and its place.
                manifest = unchanged(local, folder, inputs) or build_dataset(
                    local, folder, show, sources=[Path(out)], inputs=inputs
                )
        spans = manifest.model_dump(mode="json", include={"pretrain", "finetune", "test"})
        tracked.log_params(
            {"data_version": manifest.data_version}
            | config.windows.model_dump(mode="json")
            | {
                f"{name}_window": f"{span['start']} to {span['end']}"
                for name, span in spans.items()
            }
        )
        tracked.log_metrics(
            {
                "items": manifest.num_items,
                "items_in_buckets": manifest.rows.bucketed,
                "collision_rate": manifest.rows.collision_rate,
                "requests": manifest.requests,
                "sequences": manifest.sequences,
                "rejected": sum(manifest.rejected.values()),
                "late_events": sum(day.now - day.built for day in manifest.late.values()),
            }
        )
        tracked.log_artifact(Path(out) / "manifest.json")
        report = audited(config, Dataset.open(out))
        report.write(Path(out) / AUDIT_FILE)
        tracked.log_metrics({"audit": report.figures()})
        tracked.log_artifact(Path(out) / AUDIT_FILE)
        report.require()
    return manifest


@contextmanager
def _with_registered(config: Config) -> Iterator[Config]:
    """The config with the catalog of a registered model as a folder, while the block runs."""
    previous = config.windows.previous
    if previous is None or not previous.startswith(REGISTERED):
        yield config
        return
    with tempfile.TemporaryDirectory() as folder:
        found = fetch_catalog(config, previous, Path(folder))
        windows = config.windows.model_copy(update={"previous": found and str(found)})
        yield config.model_copy(update={"windows": windows})


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """Shows what is being done on standard error: where that is a terminal, or in JSON."""
    console = Console(stderr=True)
    if not console.is_terminal or logs.as_json():
        yield lambda step: logs.note(f"windows: {step}")
        return
    with console.status("windows") as status:
        yield lambda step: status.update(f"windows: {step}")
