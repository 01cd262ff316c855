"""Pairs arms' sample files item by item and makes the Comparison record; lm-eval's output folders; baselines."""

from .baseline import Baseline, compare_with_baseline, make_baseline, read_baseline, write_baseline
from .folders import compare_evaluations, compare_folders, read_folder, read_folders
from .pair import check_apart, compare_arms
from .samples import digest
from .summary import comparison_json, comparison_text, one_line
from .validity import check_figures, check_sources

__all__ = [
    "Baseline",
    "check_apart",
    "check_figures",
    "check_sources",
    "compare_arms",
    "compare_evaluations",
    "compare_folders",
    "compare_with_baseline",
    "comparison_json",
    "comparison_text",
    "digest",
    "make_baseline",
    "one_line",
    "read_baseline",
    "read_folder",
    "read_folders",
    "write_baseline",
]
