"""A file of schedules, read and checked as a whole before anything is called."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from pipelines.cron import Cron, parse
from pipelines.package import Package, config_text, package
from pipelines.submit import EXPERIMENT, SERVICE_ACCOUNT
from thawline.config.base import Section
from thawline.errors import ConfigError

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=50)]
MARK = re.compile(r"\[thawline set=(\S+) name=(\S+) spec=([0-9a-f]{16})\]")
"""What a recurring run's description says about where it comes from."""


class Entry(Section):
    """One schedule."""

    cron: str = Field(description="Five fields, or six with seconds first; in UTC.")
    about: str = Field("", description="What it is for; shown in the UI.")
    profile: str = Field("cpu", description="Thawline's, or a YAML file beside this one.")
    pipeline: str = Field("retrain", description="Or study, or a compiled file beside this one.")
    image: str | None = Field(None, description="Of every stage.")
    config: str | None = Field(None, description="Config file, beside this one.")
    inputs: dict[str, Any] = Field({}, description="Of the pipeline.")
    start: datetime | None = Field(None, description="No run before; in UTC unless it says.")
    end: datetime | None = Field(None, description="No run after.")
    max_concurrency: Annotated[int, Field(ge=1, le=10)] = Field(
        1, description="Runs at a time: with 1, none starts while another is under way."
    )
    catchup: bool = Field(False, description="Start the runs that were missed meanwhile.")
    cache: bool = True
    enabled: bool = True

    @field_validator("start", "end")
    @classmethod
    def _in_utc(cls, moment: datetime | None) -> datetime | None:
        if moment is None:
            return None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)

    @model_validator(mode="after")
    def _goes_together(self) -> Entry:
        if self.start and self.end and self.start >= self.end:
            raise ValueError("end is not after start")
        if self.config is not None and "config" in self.inputs:
            raise ValueError("config is given twice: as a file and among the inputs")
        return self


class ScheduleFile(Section):
    """All of them."""

    set: Name = Field("thawline", description="What this file rules; other sets are left alone.")
    experiment: str = EXPERIMENT
    service_account: str = Field(SERVICE_ACCOUNT, description="'' leaves it to the cluster.")
    schedules: dict[Name, Entry]


@dataclass(frozen=True)
class Wanted:
    """A schedule that is to be."""

    name: str
    entry: Entry
    cron: Cron
    package: Package
    values: Mapping[str, Any]
    owner: ScheduleFile

    @property
    def spec(self) -> str:
        """Hash of everything but whether it is enabled; another one means another recurring run."""
        content = json.dumps(
            {
                "cron": self.cron.text,
                "window": [_stamp(self.entry.start), _stamp(self.entry.end)],
                "about": self.entry.about,
                "pipeline": [self.package.name, self.package.version],
                "inputs": dict(self.values),
                "max_concurrency": self.entry.max_concurrency,
                "catchup": self.entry.catchup,
                "experiment": self.owner.experiment,
                "service_account": self.owner.service_account,
            },
            sort_keys=True,
        )
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def next_runs(self, count: int, now: datetime) -> list[datetime]:
        """When it runs next."""
        after = max(now, self.entry.start) if self.entry.start else now
        return self.cron.next_runs(count, after, self.entry.end)

    def body(self, version: dict[str, str], experiment_id: str) -> dict[str, Any]:
        """The recurring run, as Kubeflow takes it."""
        schedule = {"cron": self.cron.text}
        for key, moment in (("start_time", self.entry.start), ("end_time", self.entry.end)):
            if moment:
                schedule[key] = _stamp(moment)
        mark = f"[thawline set={self.owner.set} name={self.name} spec={self.spec}]"
        body: dict[str, Any] = {
            "display_name": self.name,
            "description": f"{self.entry.about} {mark}".strip(),
            "pipeline_version_reference": version,
            "experiment_id": experiment_id,
            "runtime_config": {"parameters": dict(self.values)},
            "trigger": {"cron_schedule": schedule},
            "max_concurrency": str(self.entry.max_concurrency),
            "no_catchup": not self.entry.catchup,
            "mode": "ENABLE" if self.entry.enabled else "DISABLE",
        }
        if self.owner.service_account:
            body["service_account"] = self.owner.service_account
        return body


def read_schedules(path: Path) -> tuple[ScheduleFile, list[Wanted]]:
    """Reads a file of schedules, with the pipelines and configs that it names.

    Raises:
        ConfigError: It cannot be used; the schedule and its key are named.
    """
    owner = _parsed(path)
    wanted = []
    packages: dict[tuple[str, str, str | None, bool], Package] = {}
    for name, entry in owner.schedules.items():
        where = f"{path}: {name}"
        cron = parse(entry.cron, f"{where}.cron")
        key = (entry.profile, entry.pipeline, entry.image, entry.cache)
        if key not in packages:
            packages[key] = _package(entry, path.parent)
        given = dict(entry.inputs)
        if entry.config is not None:
            given["config"] = config_text(path.parent / entry.config)
        values = packages[key].inputs(given, where)
        wanted.append(Wanted(name, entry, cron, packages[key], values, owner))
    return owner, wanted


def _parsed(path: Path) -> ScheduleFile:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", "name a file of schedules") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}", "fix the syntax") from error
    try:
        return ScheduleFile.model_validate(tree)
    except ValidationError as error:
        lines = [
            f"  {'.'.join(map(str, item['loc'])) or 'file'}: "
            + item["msg"].removeprefix("Value error, ")
            for item in error.errors()
        ]
        raise ConfigError(
            f"{path} cannot be used:\n" + "\n".join(lines),
            "correct the keys; k8s/schedule.yaml shows them all",
        ) from error


def _package(entry: Entry, folder: Path) -> Package:
    pipeline, profile = (
        str(folder / each) if (folder / each).is_file() else each
        for each in (entry.pipeline, entry.profile)
    )
    return package(pipeline, profile, entry.image, cache=entry.cache)


def _stamp(moment: datetime | None) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}" if moment else ""
