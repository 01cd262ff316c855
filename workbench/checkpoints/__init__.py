"""Checkpoints: open any known dialect, read canonical tensors, convert file to file, lint."""

from .match import matches_any
from .names import parse_name
from .open import Checkpoint, Entry, open_checkpoint

__all__ = ["Checkpoint", "Entry", "matches_any", "open_checkpoint", "parse_name"]
