"""A process that has loaded what trials need and forks one for each, which then starts at once.

Loading takes longer than a small trial does. The process never runs anything itself, so that each
trial starts from the same state and none can harm another.

`python -m thawline.stages.study_warm <fd> <names>` is that process; `Warm` starts it and asks it.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from thawline.config import Config

LOADED = (
    "thawline.stages.study_trial",
    "thawline.tracking.loaded",
    # By torch's optimizers and the report's plots, when they are first used.
    "torch._dynamo",
    "matplotlib.backends.backend_svg",
)
DEVICES = Path("/dev")
NUMBER = struct.Struct("q")
MESSAGE = 65_536


class Warm:
    """The other end of such a process, which is started when it is first needed."""

    def __init__(self, threads: int, loaded: Sequence[str] = LOADED) -> None:
        """Starts nothing yet.

        Args:
            threads: That each trial may use, unless its config says how many.
            loaded: Names of what is to be loaded.
        """
        self._threads = threads
        self._loaded = loaded
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, module: str, folder: Path, log: Path) -> Forked | None:
        """Runs `module.main(folder)` in a process of its own, in a session of its own.

        Args:
            module: To be imported.
            folder: Of the job.
            log: Gets what it prints.

        Returns:
            None where it cannot: start it in another way.
        """
        ours, theirs = socket.socketpair()
        request = json.dumps({"module": module, "folder": str(folder), "log": str(log)}).encode()
        with theirs:
            try:
                socket.send_fds(self._connected(), [request], [theirs.fileno()])
            except OSError:
                ours.close()
                return None
        pid = _receive(ours)
        if pid is None:
            ours.close()
            return None
        return Forked(pid, ours)

    def close(self) -> None:
        """Ends the process; those that it has forked go on."""
        with self._lock:
            if self._control is not None:
                self._control.close()
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def _connected(self) -> socket.socket:
        with self._lock:
            if self._control is None:
                self._control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
                # OpenMP would start as many threads as there are cores.
                more = {"OMP_NUM_THREADS": str(self._threads), "PYTHONUNBUFFERED": "1"}
                with theirs:
                    self._process = subprocess.Popen(  # noqa: S603
                        [sys.executable, "-m", __name__, str(theirs.fileno()), *self._loaded],
                        env={**os.environ, **more},
                        pass_fds=[theirs.fileno()],
                        start_new_session=True,
                    )
            return self._control


class Forked:
    """A process that was forked for us; as much of `subprocess.Popen` as is needed."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        """Takes over the connection, on which the exit code will come."""
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection

    def poll(self) -> int | None:
        """Its exit code (of a signal, minus its number); None while it runs."""
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end.

        Raises:
            TimeoutExpired: It runs longer.
        """
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            ready, _, _ = select.select([self._connection], [], [], timeout)
            if ready:
                code = _receive(self._connection)
                # The one that waited for it was killed, and so was it, by whoever does such things.
                self.returncode = -signal.SIGKILL if code is None else code
                self._connection.close()
        return self.returncode


@contextmanager
def warmed(config: Config, threads: int) -> Iterator[Warm | None]:
    """A warm process for the block; None where trials have to be started one by one.

    A process that may have touched a GPU's driver cannot be forked, and on other systems than Linux
    the libraries' threads are not made for it.
    """
    gpu = config.runtime.device != "cpu" and any(DEVICES.glob("nvidia*"))
    if sys.platform != "linux" or gpu:
        yield None
        return
    warm = Warm(threads)
    try:
        yield warm
    finally:
        warm.close()


def _receive(connection: socket.socket) -> int | None:
    """A number; None where the other end is gone."""
    try:
        found = connection.recv(NUMBER.size, socket.MSG_WAITALL)
    except OSError:
        return None
    return NUMBER.unpack(found)[0] if len(found) == NUMBER.size else None


def _serve(control: socket.socket, loaded: Iterable[str]) -> None:
    """Forks for each request until the other end is closed."""
    for name in loaded:
        importlib.import_module(name)
    # Nobody waits for those that wait for a trial.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, MESSAGE, 1)
        if not request:
            return
        if os.fork() == 0:
            control.close()
            _supervise(json.loads(request), socket.socket(fileno=descriptors[0]))
        os.close(descriptors[0])


def _supervise(request: dict[str, str], connection: socket.socket) -> NoReturn:
    """Tells the pid and the exit code of what is asked for."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        connection.close()
        _run(request)
    threading.Thread(target=_end_with, args=(connection, pid), daemon=True).start()
    try:
        connection.sendall(NUMBER.pack(pid))
        _, status = os.waitpid(pid, 0)
        connection.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))
    except OSError:
        pass  # The study is gone.
    os._exit(0)


def _end_with(connection: socket.socket, pid: int) -> None:
    """Ends a process whose study was killed: it would be in the way of the one that goes on."""
    with suppress(OSError):
        connection.recv(1)  # Nothing ever comes but the end.
        os.kill(pid, signal.SIGTERM)


def _run(request: dict[str, str]) -> NoReturn:
    code = 1
    try:
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for descriptor in (sys.stdout.fileno(), sys.stderr.fileno()):
            os.dup2(log, descriptor)
        importlib.import_module(request["module"]).main(Path(request["folder"]))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # What the loading process has registered for its own end is not for this one.
        os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
