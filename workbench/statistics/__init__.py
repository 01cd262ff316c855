"""Statistics of paired right/wrong answers. Counts in, floats out; no files, no records, no torch.

`lost` counts items the baseline answers right and the candidate wrong, `gained` the opposite, `n` all items. A *loss*
is baseline minus candidate, a proportion in [-1, 1], positive = the candidate is worse.
"""

from .paired import loss_interval, loss_upper_bound, mcnemar_exact, recovery_interval
from .power import minimum_detectable_loss, power_of_mcnemar
from .proportion import wilson_interval

__all__ = [
    "loss_interval",
    "loss_upper_bound",
    "mcnemar_exact",
    "minimum_detectable_loss",
    "power_of_mcnemar",
    "recovery_interval",
    "wilson_interval",
]
