"""The `windows` component."""

from components.windows.component import windows

__all__ = ["windows"]
