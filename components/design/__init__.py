"""The `design` component."""

from components.design.component import design

__all__ = ["design"]
