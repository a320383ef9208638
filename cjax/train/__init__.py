"""Training as a whole: the loop around `program.step`, with progress, metrics, evaluation, checkpoints and signals."""

from cjax.train.callbacks import Callback, EarlyStop, LossSpike, ProfileSteps, Training
from cjax.train.copies import CopiesDifferError
from cjax.train.fit import FitResult, fit
from cjax.train.loop import NotFiniteError
from cjax.train.writers import JSONL, MLflow, Prometheus, TensorBoard, WandB, Writer

__all__ = [
    "JSONL",
    "Callback",
    "CopiesDifferError",
    "EarlyStop",
    "FitResult",
    "LossSpike",
    "MLflow",
    "NotFiniteError",
    "ProfileSteps",
    "Prometheus",
    "TensorBoard",
    "Training",
    "WandB",
    "Writer",
    "fit",
]
