"""The `arms` component."""

from components.arms.component import arms

__all__ = ["arms"]
