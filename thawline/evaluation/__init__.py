"""Judging a model: scored requests, metrics by tier, findings in words, the gate, the report."""
