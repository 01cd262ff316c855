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
    LostAnswers,
    Perplexity,
    Preflight,
    PreflightFinding,
    PreflightTask,
    TaskScore,
    Transport,
)
from .locks import give_lock, hold_lock, take_lock
from .measured import GemmRecord, LintFinding, LintReport, ServerRecord, TensorRecord
from .numerics import NumericsCard, NumericsRow
from .serving import ClientRun, CostRatio, Latency, ServingCost, ServingLoad, Sourced, StartCost, speed_apart
from .storage import (
    SCHEMA_VERSION,
    from_json,
    json_text,
    parse_json,
    plain,
    read_json,
    to_json,
    write_bytes,
    write_json,
    write_text,
)
from .verdict import (
    Attribution,
    Comparison,
    Flip,
    GateCheck,
    GradedComparison,
    LayerFinding,
    Manifest,
    Stratum,
    TaskComparison,
    TensorEquality,
    Verdict,
)

__all__ = [
    "SCHEMA_VERSION",
    "ArtefactPanel",
    "Attribution",
    "Bounded",
    "ClientRun",
    "Comparison",
    "CostRatio",
    "Divergence",
    "Evaluation",
    "Flip",
    "GateCheck",
    "GemmRecord",
    "GradedComparison",
    "Latency",
    "LayerFinding",
    "LengthDrift",
    "LintFinding",
    "LintReport",
    "LostAnswers",
    "Manifest",
    "NumericsCard",
    "NumericsRow",
    "Perplexity",
    "Preflight",
    "PreflightFinding",
    "PreflightTask",
    "ServerRecord",
    "ServingCost",
    "ServingLoad",
    "Sourced",
    "StartCost",
    "Stratum",
    "TaskComparison",
    "TaskScore",
    "TensorEquality",
    "TensorRecord",
    "Transport",
    "Verdict",
    "from_json",
    "give_lock",
    "hold_lock",
    "json_text",
    "parse_json",
    "plain",
    "read_json",
    "speed_apart",
    "take_lock",
    "to_json",
    "write_bytes",
    "write_json",
    "write_text",
]
