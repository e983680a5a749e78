"""The `gather` component."""

from components.gather.component import gather

__all__ = ["gather"]
