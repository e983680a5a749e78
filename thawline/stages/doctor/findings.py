"""A look and what came of it, within a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from thawline.errors import ThawlineError
from thawline.logs import without_secrets

Status = Literal["pass", "fail", "skipped"]


class Skipped(Exception):  # noqa: N818
    """There is nothing to look at, or it cannot be looked at from here."""


@dataclass(frozen=True)
class Look:
    """One line of the findings to be."""

    name: str
    function: Callable[[], str]
    """Says what it found; raises a ThawlineError or `Skipped` otherwise."""
    seconds: float = 30.0
    """After which it has failed."""
    if_late: str = "see whether the machine or the network is overloaded"
    """The remedy then."""


@dataclass(frozen=True)
class Finding:
    """What a look came to."""

    check: str
    status: Status
    detail: str
    remedy: str
    """Empty unless it failed."""
    seconds: float


def examine(looks: Iterable[Look], begins: Callable[[str], None] = lambda _: None) -> list[Finding]:
    """Takes the looks one after another, each within its time.

    Args:
        looks: What is to be looked at.
        begins: Is told the name of each.
    """
    findings = []
    for look in looks:
        begins(look.name)
        findings.append(take(look))
    return findings


def take(look: Look) -> Finding:
    """What one look comes to; no secret of the environment is in its words."""
    outcome: list[tuple[Status, str, str]] = []
    # A thread that hangs in a driver or a socket cannot be ended, but it can be left behind.
    thread = threading.Thread(target=lambda: outcome.append(_outcome(look)), daemon=True)
    started = time.monotonic()
    thread.start()
    thread.join(look.seconds)
    late: tuple[Status, str, str] = (
        "fail",
        f"did not come to an end within {look.seconds:g} s",
        look.if_late,
    )
    status, detail, remedy = outcome[0] if outcome else late
    return Finding(
        check=look.name,
        status=status,
        detail=without_secrets(detail),
        remedy=without_secrets(remedy),
        seconds=round(time.monotonic() - started, 3),
    )


def _outcome(look: Look) -> tuple[Status, str, str]:
    try:
        return "pass", look.function(), ""
    except Skipped as reason:
        return "skipped", str(reason), ""
    except ThawlineError as error:
        return "fail", error.what, error.remedy
    except ImportError as error:
        remedy = "install Thawline again with what it needs: pip install 'thawline[cpu]', or [gpu]"
        return "fail", str(error), remedy
    except Exception as error:
        # One look that goes wrong in an unforeseen way must not hide the others.
        line = str(error).partition("\n")[0]
        return "fail", f"{type(error).__name__}: {line}", "this was not foreseen: report it"
