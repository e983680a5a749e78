"""Errors that a user can act on.

Each names the file, column, key or id at fault, says what is wrong and what to do. The command
line prints the message alone; anything that is not a `ThawlineError` is a defect of ours and keeps
its traceback.
"""


class ThawlineError(Exception):
    """Base of every error that a user's input or surroundings can cause."""

    def __init__(self, what: str, remedy: str) -> None:
        """Says what is wrong (naming the place) and what to do about it."""
        super().__init__(f"{what}\n  What to do: {remedy}")
        self.what = what
        self.remedy = remedy


class ConfigError(ThawlineError):
    """A config file, key, value or override that cannot be used."""


class DataError(ThawlineError):
    """Events, a dataset or a table file that cannot be used."""


class BusyError(ThawlineError):
    """A folder that another process is building."""


class TrackingError(ThawlineError):
    """An MLflow server, experiment, model name or version that cannot be used."""


class TrainingError(ThawlineError):
    """Training that cannot start or go on (a NaN loss, an epoch without a batch, ...)."""


class ClusterError(ThawlineError):
    """A Kubernetes cluster that refuses something, does not answer, or let a job fail."""

    def __init__(self, what: str, remedy: str, *, passing: bool = False) -> None:
        """Says, besides, whether it may pass by itself: the same call is worth another try."""
        super().__init__(what, remedy)
        self.passing = passing
