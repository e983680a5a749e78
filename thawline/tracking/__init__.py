"""MLflow: runs, the registry and the served model. Nothing else in Thawline imports mlflow.

MLflow reads these variables when it is imported; the environment's own values win.
"""

import os

# A training job talks to the tracking server that its config names and to nobody else.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# Thawline draws its own progress.
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
