"""Policy and records in, verdict and exit code out; JUnit, step summary, history."""

from workbench.records.judged import EXIT_CODES

from .gate import gate
from .history import append_history, read_history, trend_lines
from .junit import to_junit
from .policy import Policy, read_policy
from .promised import Promised, read_promised
from .step_summary import append_step_summary, to_step_summary
from .thresholds import import_policy, is_foreign_policy

__all__ = [
    "EXIT_CODES",
    "Policy",
    "Promised",
    "append_history",
    "append_step_summary",
    "gate",
    "import_policy",
    "is_foreign_policy",
    "read_history",
    "read_policy",
    "read_promised",
    "to_junit",
    "to_step_summary",
    "trend_lines",
]
