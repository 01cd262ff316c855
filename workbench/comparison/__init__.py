"""Pairs arms' sample files item by item and makes the Comparison record; lm-eval's output folders; baselines."""

from .baseline import Baseline, compare_with_baseline, make_baseline, read_baseline, write_baseline
from .folders import compare_folders, read_folder
from .pair import compare_arms
from .samples import digest
from .summary import comparison_json, comparison_text

__all__ = [
    "Baseline",
    "compare_arms",
    "compare_folders",
    "compare_with_baseline",
    "comparison_json",
    "comparison_text",
    "digest",
    "make_baseline",
    "read_baseline",
    "read_folder",
    "write_baseline",
]
