"""The `finetune` component."""

from components.finetune.component import finetune

__all__ = ["finetune"]
