"""Policy and records in, verdict and exit code out."""

from .gate import EXIT_CODES, gate
from .junit import to_junit
from .policy import Policy, read_policy

__all__ = ["EXIT_CODES", "Policy", "gate", "read_policy", "to_junit"]
