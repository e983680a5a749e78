"""Recipes against each other over several seeds: what their runs say together."""
