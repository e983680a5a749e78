"""A model that doubles numbers: what a round trip through MLflow registers and loads again."""

from __future__ import annotations

from typing import Any

import pandas as pd
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel


class Doubled(PythonModel):
    """Takes a column `value`."""

    def predict(
        self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        """Twice the values."""
        return model_input[["value"]] * 2.0


set_model(Doubled())
