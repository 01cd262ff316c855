"""Statistics of paired answers. Arrays and counts in, floats and frozen records out; no files, no torch.

`lost` counts items the baseline answers right and the candidate wrong, `gained` the opposite, `n` all items. A *loss*
is baseline minus candidate, a proportion in [-1, 1], positive = the candidate is worse. docs/statistics.md says which
method stands where, and what its simulated size, power and coverage are.
"""

from .answers import PairedLoss, discordance_above_noise, paired_loss, paired_loss_of_counts
from .clusters import ClusteredLoss, clustered_loss
from .decision import ALPHA, holm, judge_loss
from .paired import loss_interval, mcnemar_exact, recovery_interval
from .power import minimum_detectable_loss, more_items_needed, power_of_mcnemar, power_of_noninferiority
from .proportion import accuracy_bounds, wilson_interval
from .resampling import GradedLoss, bootstrap_loss, graded_loss
from .strata import StratifiedLoss, stratified_loss
from .threshold import ThresholdPower, threshold_power
from .trend import Trend, trend
from .upper_bound import loss_upper_bound, noninferiority_pvalue

__all__ = [
    "ALPHA",
    "ClusteredLoss",
    "GradedLoss",
    "PairedLoss",
    "StratifiedLoss",
    "ThresholdPower",
    "Trend",
    "accuracy_bounds",
    "bootstrap_loss",
    "clustered_loss",
    "discordance_above_noise",
    "graded_loss",
    "holm",
    "judge_loss",
    "loss_interval",
    "loss_upper_bound",
    "mcnemar_exact",
    "minimum_detectable_loss",
    "more_items_needed",
    "noninferiority_pvalue",
    "paired_loss",
    "paired_loss_of_counts",
    "power_of_mcnemar",
    "power_of_noninferiority",
    "recovery_interval",
    "stratified_loss",
    "threshold_power",
    "trend",
    "wilson_interval",
]
