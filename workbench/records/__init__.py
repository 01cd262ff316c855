"""Every record the workbench writes, as frozen dataclasses; units stand in the field names and docstrings.

Rooms hand these on to each other: lint, analysis, serving and evaluation produce them, comparison and gating join
them, reporting renders them and computes nothing else. `to_json` / `write_json` store them with the schema version;
`write_text` and friends write to a temporary name first, so a killed run leaves no half file.
"""

from .answers import (
    ArtefactPanel,
    Bounded,
    Divergence,
    Evaluation,
    LengthDrift,
    Perplexity,
    Preflight,
    PreflightFinding,
    PreflightTask,
    TaskScore,
    Transport,
)
from .measured import GemmRecord, LintFinding, LintReport, ServerRecord, TensorRecord
from .storage import SCHEMA_VERSION, from_json, plain, read_json, to_json, write_bytes, write_json, write_text
from .verdict import (
    Comparison,
    Flip,
    GateCheck,
    GradedComparison,
    Manifest,
    Stratum,
    TaskComparison,
    TensorEquality,
    Verdict,
)

__all__ = [
    "SCHEMA_VERSION",
    "ArtefactPanel",
    "Bounded",
    "Comparison",
    "Divergence",
    "Evaluation",
    "Flip",
    "GateCheck",
    "GemmRecord",
    "GradedComparison",
    "LengthDrift",
    "LintFinding",
    "LintReport",
    "Manifest",
    "Perplexity",
    "Preflight",
    "PreflightFinding",
    "PreflightTask",
    "ServerRecord",
    "Stratum",
    "TaskComparison",
    "TaskScore",
    "TensorEquality",
    "TensorRecord",
    "Transport",
    "Verdict",
    "from_json",
    "plain",
    "read_json",
    "to_json",
    "write_bytes",
    "write_json",
    "write_text",
]
