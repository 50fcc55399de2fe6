"""Write a job's log to experiment trackers: MLflow, and Weights & Biases."""

from __future__ import annotations

from etrain_jupyter.plugin import Plugin

_HERE = "etrain_jupyter.plugins.trackers"

PLUGIN = Plugin(
    loggers={
        "mlflow": f"{_HERE}.mlflow_logger:MlflowLogger",
        "wandb": f"{_HERE}.wandb_logger:WandbLogger",
    }
)
