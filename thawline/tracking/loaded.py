"""Loads what MLflow would load with the first run; for a process that is to be forked."""

import mlflow.store.tracking.sqlalchemy_store  # noqa: F401
