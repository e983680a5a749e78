"""The `start` component."""

from components.start.component import start

__all__ = ["start"]
