"""The `finish` component."""

from components.finish.component import finish

__all__ = ["finish"]
