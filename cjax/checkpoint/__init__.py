"""Checkpoints of logical arrays: written in the background, whole or not at all, read back onto any plan."""

from cjax.checkpoint.checkpointer import Checkpointer
from cjax.checkpoint.description import ArrayInfo, Summary, inspect
from cjax.checkpoint.rows import LeafPiece, Rows, Unread
from cjax.checkpoint.storage import restore, save

__all__ = ["ArrayInfo", "Checkpointer", "LeafPiece", "Rows", "Summary", "Unread", "inspect", "restore", "save"]
