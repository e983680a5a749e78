"""What an audit found: findings with a severity, and whether they stop the pipeline."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from thawline.config import FindingName
from thawline.errors import DataError

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


class Finding(BaseModel):
    """One thing that a reader should know before training."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: FindingName
    severity: Severity
    text: str
    """What is the case, in words."""
    remedy: str = ""
    """What to do about it; empty for `info`."""
    figures: dict[str, float] = {}
    waived: bool = False
    """An error that the config lets pass by its name."""

    @property
    def stops(self) -> bool:
        """Whether the pipeline must not go on."""
        return self.severity == "error" and not self.waived


class AuditReport(BaseModel):
    """`audit.json`: the findings about a dataset and the sampler that a config sets on it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data_version: str
    negatives: dict[str, Any]
    """The config's section, which decides what the sampler draws."""
    findings: list[Finding]
    """The most severe first."""

    @property
    def errors(self) -> list[Finding]:
        """The findings that stop the pipeline."""
        return [finding for finding in self.findings if finding.stops]

    def figures(self) -> dict[str, Any]:
        """Every figure by finding, and the number of findings by severity, for MLflow."""
        counts = {
            severity: sum(finding.severity == severity for finding in self.findings)
            for severity in SEVERITIES
        }
        tree: dict[str, Any] = {finding.name: finding.figures for finding in self.findings}
        return tree | counts

    def require(self) -> None:
        """Stops here if there are errors that are not waived.

        Raises:
            DataError: Names each of them, and what to do.
        """
        errors = self.errors
        if not errors:
            return
        listed = "\n".join(f"    {finding.name}: {finding.text}" for finding in errors)
        names = ", ".join(finding.name for finding in errors)
        raise DataError(
            f"the audit of the dataset {self.data_version[:12]} found what would make the "
            f"model's figures untrue:\n{listed}",
            f"{'; '.join(finding.remedy for finding in errors)}; or let it pass with "
            f"audit.waive: [{names}]",
        )

    def write(self, path: Path) -> None:
        """Writes `audit.json`, whole or not at all."""
        beside = path.with_name(f".{path.name}")
        beside.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        os.replace(beside, path)

    @classmethod
    def read(cls, path: Path) -> AuditReport | None:
        """Reads `audit.json`; None where there is none, or one that cannot be read."""
        try:
            return cls.model_validate(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, ValidationError):
            return None
