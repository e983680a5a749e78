"""Trials in processes of their own, a few at a time, none of which can harm another."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thawline.config import Config, load_config
from thawline.errors import ThawlineError
from thawline.stages.study_files import (
    CONFIG,
    LOG,
    Task,
    read_result,
    read_task,
    write_result,
    write_task,
)
from thawline.stages.study_warm import Forked, Warm

POLL_SECONDS = 0.1
GRACE_SECONDS = 60.0
"""For which a trial that is stopped may write its checkpoint."""
TAIL = 12
"""Lines of a log that tell why a process died."""


@dataclass(frozen=True)
class Job:
    """A trial that is to run, or epochs that trials share."""

    task: Task
    config: Config
    folder: Path
    after: str | None = None
    """The key of a job that is to end before it, however it does."""


Result = dict[str, Any]
Runner = Callable[[Job, threading.Event], Result | None]
"""Runs a job to its end and gives its result; None where the event stopped it."""


def run_jobs(
    jobs: Sequence[Job], runner: Runner, at_once: int, on_start: Callable[[Job], None]
) -> Generator[tuple[Job, Result], None, None]:
    """Runs jobs and gives each with its result as soon as it is there.

    A runner's error becomes the result of its job alone. Where the caller is stopped (Ctrl-C), the
    running ones are stopped and the others never start; it has to close what it is given.

    Args:
        jobs: In the order in which they start, but for those that wait for others.
        runner: What runs one.
        at_once: How many run at a time.
        on_start: Called when one starts, in another thread.
    """
    stop = threading.Event()

    def one(job: Job) -> Result | None:
        if stop.is_set():
            return None
        on_start(job)
        try:
            return runner(job, stop)
        except Exception as error:
            return job.task.result("failed", error=f"{type(error).__name__}: {error}", remedy="")

    waiting = list(jobs)
    running: dict[Future[Result | None], Job] = {}
    with ThreadPoolExecutor(at_once) as pool:

        def start_next() -> None:
            unfinished = {job.task.trial for job in (*waiting, *running.values())}
            ready = [job for job in waiting if job.after not in unfinished]
            for job in ready[: at_once - len(running)]:
                waiting.remove(job)
                running[pool.submit(one, job)] = job

        try:
            start_next()
            while running:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                stopped = [future for future in done if future.exception() is not None]
                ended = [(running.pop(future), future) for future in done - set(stopped)]
                if not stopped:
                    start_next()
                for job, future in ended:
                    result = future.result()
                    if result is not None:
                        yield job, result
                for future in stopped:
                    future.result()
        finally:
            stop.set()


def run_process(
    job: Job,
    stop: threading.Event,
    threads: int,
    module: str = "thawline.stages.study_trial",
    warm: Warm | None = None,
) -> Result | None:
    """Runs a job by our own Python, with its output in `log.txt`.

    Args:
        job: Its folder is made.
        stop: Ends the process; it saves a checkpoint first.
        threads: That it may use, unless its config says how many.
        module: Its `main`, which it runs as a program too, gets the job's folder and calls `serve`.
        warm: Starts it sooner, where it can.
    """
    runtime = job.config.runtime
    if not runtime.threads:
        runtime = runtime.model_copy(update={"threads": threads})
    write_task(job.folder, job.task, job.config.model_copy(update={"runtime": runtime}))
    process: Forked | subprocess.Popen[bytes] | None = None
    if warm is not None:
        process = warm.start(module, job.folder, job.folder / LOG)
    if process is None:
        process = _start(module, job.folder, threads)
    try:
        while process.poll() is None:
            if stop.wait(POLL_SECONDS):
                _end(process)
                return None
    finally:
        if process.poll() is None:
            process.kill()
    return read_result(job.folder) or job.task.result(
        "failed",
        error=f"its process ended with {_ending(process.wait())}:\n{_tail(job.folder / LOG)}",
        remedy="run the study again: the trial goes on from its last checkpoint",
    )


def _start(module: str, folder: Path, threads: int) -> subprocess.Popen[bytes]:
    # OpenMP would start as many threads as there are cores before the config is read.
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    with (folder / LOG).open("ab") as log:
        # In a session of its own, so that Ctrl-C comes to it through us alone.
        return subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", module, str(folder)],
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )


def serve(folder: Path, work: Callable[[Config, Task, Path], object]) -> None:
    """Does what `write_task` described, in a process of its own; an error becomes its result.

    Args:
        folder: Of the job.
        work: Gets the job's config, task and folder, and writes its result.

    Raises:
        Terminated: After SIGTERM.
    """
    task = read_task(folder)
    try:
        work(load_config(folder / CONFIG), task, folder)
    except ThawlineError as error:
        print(error, file=sys.stderr)
        write_result(folder, task.failed(error))
    except Exception as error:
        traceback.print_exc()
        what = f"{type(error).__name__}: {error}"
        remedy = f"see {folder / LOG}; this is a defect"
        write_result(folder, task.result("failed", error=what, remedy=remedy))


def threads_of(at_once: int) -> int:
    """Cores of this machine for each of so many processes."""
    return max(1, len(os.sched_getaffinity(0)) // at_once)


def _end(process: subprocess.Popen[bytes] | Forked) -> None:
    process.terminate()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"code {code}"


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-TAIL:])
