"""What kfp's local runner prints, sorted: the stages' lines for people, all of it for a file."""

from __future__ import annotations

import io
import re
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import TextIO

ANSI = re.compile(r"\x1b\[[0-9;]*m")
STARTED = re.compile(r"Executing task '([^']+)'")
ENDED = re.compile(r"Task '([^']+)' finished with status (\w+)")
OWN_ERROR = re.compile(r"^thawline\.errors\.\w+: ", re.MULTILINE)
REMEDY = "\n  What to do: "
INDENT = "    "
"""kfp indents what a task prints."""


class StageLog(io.TextIOBase):
    """A standard output for the local runner."""

    def __init__(self, path: Path, out: TextIO) -> None:
        """Writes everything to `path`, and the stages' lines with their names to `out`."""
        self.path = path
        self.failed: str | None = None
        """The first stage that failed."""
        self._out = out
        self._file = path.open("w", encoding="utf-8")
        self._partial = ""
        self._stage = ""
        self._started = 0.0
        self._in_input = False
        self._tail: deque[str] = deque(maxlen=100)
        self._failed_tail: list[str] = []

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, text: str) -> int:
        """Takes text of any length; lines are sorted when they are complete."""
        *lines, self._partial = (self._partial + text).split("\n")
        for line in lines:
            self._take(ANSI.sub("", line))
        return len(text)

    def flush(self) -> None:
        """Flushes both outputs."""
        self._file.flush()
        self._out.flush()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the file; `out` stays open."""
        self._file.close()

    def last_lines(self, count: int = 20) -> list[str]:
        """The last lines of the stage that failed."""
        return self._failed_tail[-count:]

    def own_error(self) -> tuple[str, str] | None:
        """What is wrong and the remedy, where the failed stage raised an error of Thawline."""
        *_, message = OWN_ERROR.split("\n".join(self._failed_tail))
        what, separator, remedy = message.rpartition(REMEDY)
        # Whatever was raised after it is the error that ended the stage.
        if not separator or "\nTraceback " in remedy:
            return None
        return what, remedy.strip()

    def _take(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()
        if started := STARTED.search(line):
            self._stage, self._started = started.group(1), time.perf_counter()
            self._tail.clear()
            self._show(f"==> {self._stage}")
        elif ended := ENDED.search(line):
            self._end(ended.group(2))
        elif self._stage and line.startswith(INDENT) and not self._is_noise(line):
            self._tail.append(line.removeprefix(INDENT))
            self._show(line)

    def _end(self, status: str) -> None:
        seconds = time.perf_counter() - self._started
        self._show(f"    {'done' if status == 'SUCCESS' else 'FAILED'} in {seconds:.1f} s")
        if status != "SUCCESS" and self.failed is None:
            self.failed, self._failed_tail = self._stage, list(self._tail)
        self._stage = ""

    def _is_noise(self, line: str) -> bool:
        # kfp prints each task's whole input, which holds the config, as indented JSON.
        if self._in_input:
            self._in_input = line != INDENT + "}"
            return True
        self._in_input = line.endswith("Got executor_input:")
        return "[KFP Executor " in line or not line.strip()

    def _show(self, line: str) -> None:
        self._out.write(line + "\n")
        self._out.flush()
