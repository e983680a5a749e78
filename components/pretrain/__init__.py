"""The `pretrain` component."""

from components.pretrain.component import pretrain

__all__ = ["pretrain"]
