"""Training as a whole: the loop around `program.step`, with progress, metrics, evaluation, checkpoints and signals."""

from cjax.train.fit import FitResult, NotFiniteError, fit

__all__ = ["FitResult", "NotFiniteError", "fit"]
