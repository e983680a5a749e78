"""Thawline: recommenders whose ID embedding tables survive more than one epoch."""

__version__ = "0.1.0"
