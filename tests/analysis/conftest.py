"""Fixtures of the analysis tests."""

from .trio_checkpoints import trio

__all__ = ["trio"]
