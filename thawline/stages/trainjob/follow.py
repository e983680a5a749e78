"""The log of a TrainJob's first node, shown while the job runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from thawline.errors import ClusterError
from thawline.stages.trainjob.cluster import Cluster

OVERLAP_SECONDS = 5
"""A stream that broke is taken up again so long before its last line."""


class LogFollower(threading.Thread):
    """Shows each line once, whatever becomes of the connection or of the pod."""

    def __init__(
        self, cluster: Cluster, job: str, show: Callable[[str], None], pause: float
    ) -> None:
        """Begins with `start()`.

        Args:
            cluster: Where the job runs.
            job: Its name.
            show: Takes a line.
            pause: Seconds between two looks for a pod or a connection.
        """
        super().__init__(name=f"log of {job}", daemon=True)
        self._cluster, self._job, self._show, self._pause = cluster, job, show, pause
        self._ended = threading.Event()
        self._last = ""
        self._seen_at = 0.0

    def run(self) -> None:
        """Until `finish`."""
        while not self._ended.is_set():
            self._pass(follow=True)
            self._ended.wait(self._pause)

    def finish(self, within: float = 10.0) -> None:
        """Shows what is left once the job has ended.

        Args:
            within: Seconds for which a line that is being read is waited for.
        """
        self._ended.set()
        if self.ident is None:
            return
        self.join(within)
        if not self.is_alive():
            self._pass(follow=False)

    def _pass(self, *, follow: bool) -> None:
        # What cannot be shown now is shown in the next pass; the job itself is watched elsewhere.
        try:
            pods = self._cluster.pods(self._job)
            if not pods or not pods[0].started:
                return
            since = int(time.monotonic() - self._seen_at) + OVERLAP_SECONDS if self._last else None
            for stamp, text in self._cluster.log(pods[0].name, follow=follow, since=since):
                if stamp > self._last:
                    self._last, self._seen_at = stamp, time.monotonic()
                    self._show(text)
        except ClusterError:
            return
