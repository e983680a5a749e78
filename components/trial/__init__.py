"""The `trial` component."""

from components.trial.component import trial

__all__ = ["trial"]
