"""The `study` component."""

from components.study.component import study

__all__ = ["study"]
