"""What is said on standard error beside a command's results: text for people, JSON on a cluster.

JSON is one object a line with `time`, `level`, `stage`, `message` and `run_id`. It is chosen where
`THAWLINE_LOG` is `json`, or unset in a Kubernetes pod whose standard error is no terminal.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

from rich.console import Console

from thawline.errors import ConfigError, ThawlineError

VARIABLE = "THAWLINE_LOG"
IN_A_POD = "KUBERNETES_SERVICE_HOST"
"""Kubernetes sets it in every container."""
SECRET_NAME = re.compile(r"PASSWORD|PASSWD|SECRET|TOKEN|COOKIE|CREDENTIAL|HEADERS", re.IGNORECASE)
SHORTEST_SECRET = 6
"""A shorter value would be found in every other word."""
HIDDEN = "***"

Level = Literal["info", "warning", "error"]

_doing: ContextVar[tuple[str, str]] = ContextVar("_doing", default=("", ""))


def as_json() -> bool:
    """Whether lines are JSON.

    Raises:
        ConfigError: `THAWLINE_LOG` is something else than `json` or `text`.
    """
    chosen = os.environ.get(VARIABLE, "")
    if chosen not in ("", "json", "text"):
        raise ConfigError(f"{VARIABLE} is {chosen!r}", f"set {VARIABLE} to json or text, or not")
    if chosen:
        return chosen == "json"
    return bool(os.environ.get(IN_A_POD)) and not sys.stderr.isatty()


def say(message: str, level: Level = "info") -> None:
    """Writes a line, without secrets.

    Raises:
        ConfigError: See `as_json`.
    """
    _write(message, level, json_lines=as_json())


def note(message: str, level: Level = "info") -> None:
    """Writes a line where lines are JSON; people see the same in another way."""
    if as_json():
        _write(message, level, json_lines=True)


def fail(error: ThawlineError) -> None:
    """Writes the error that ends a command."""
    try:
        json_lines = as_json()
    except ConfigError:
        json_lines = False
    if json_lines:
        _write(str(error), "error", json_lines=True)
        return
    text = without_secrets(str(error)).replace("[", r"\[")
    Console(stderr=True).print(f"[bold red]Error:[/] {text}", highlight=False, soft_wrap=True)


@contextmanager
def stage(name: str, run_id: str) -> Iterator[None]:
    """Lines that are written inside belong to a stage and its MLflow run."""
    before = _doing.set((name, run_id))
    try:
        yield
    finally:
        _doing.reset(before)


def without_secrets(text: str) -> str:
    """The text without what stands before the `@` of a URI and without secrets of the environment.

    A variable is secret by its name: `SECRET_NAME`.
    """
    text = re.sub(r"://[^/\s'\"]*@", f"://{HIDDEN}@", text)
    values = [value for name, value in os.environ.items() if SECRET_NAME.search(name)]
    lines = {line.strip() for value in values for line in value.splitlines()}
    # Of `name: value` in a variable of headers, the value alone may be quoted somewhere.
    lines |= {line.partition(":")[2].strip() for line in lines}
    for secret in sorted(lines, key=len, reverse=True):
        # What could be a file's path or a switch is no secret.
        if len(secret) >= SHORTEST_SECRET and not secret.startswith("/"):
            text = text.replace(secret, HIDDEN)
    return text


def _write(message: str, level: Level, *, json_lines: bool) -> None:
    text = without_secrets(message)
    if json_lines:
        name, run_id = _doing.get()
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        facts = {"time": now, "level": level, "stage": name, "message": text, "run_id": run_id}
        text = json.dumps(facts, ensure_ascii=False)
    print(text, file=sys.stderr, flush=True)
