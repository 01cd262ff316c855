"""Pairs two arms' sample files item by item and makes the Comparison record."""

from .pair import compare_arms

__all__ = ["compare_arms"]
