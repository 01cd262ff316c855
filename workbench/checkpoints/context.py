"""How many tokens a model holds by its own config.json, and what that does to the context asked for.

    tokens = fit_context(4096, [Path("mini_kimi")], default=4096, key="model.max_model_len={}")

A default of ours that is longer than the model's own gives way to it; a length that the user asked for is refused
instead. Where the config leaves a doubt (YaRN, whose releases disagree on what is scaled already) nothing is changed
and the engine has its say. Source: vLLM 0.32, `_get_and_verify_max_len`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from workbench.errors import ConfigError

ALLOW_LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"  # vLLM's own switch, in the environment
_SCALED_ALREADY = ("default", "su", "longrope", "llama3")  # max_position_embeddings holds the factor
_SCALED_BY_FACTOR = ("linear", "dynamic")


def fit_context(asked: int, folders: Iterable[Path], *, default: int, key: str) -> int:
    """`asked` tokens (0: the model's own), or the shortest of the checkpoints' own where `asked` is only the default.

    key: how the user sets it, with {} for the number. Raises ConfigError where the user asks for more than is held.
    """
    known = [(length, folder) for folder in folders if (length := read_context_length(folder)) is not None]
    if not known or asked <= min(known)[0] or os.environ.get(ALLOW_LONGER) == "1":
        return asked
    length, folder = min(known)
    if asked == default:
        return length
    raise ConfigError(
        f"{key.format(asked)} is more than {folder} holds: {length} tokens, by its config.json", fix=key.format(length)
    )


def read_context_length(folder: Path) -> int | None:
    """Tokens by a folder's config.json; None where it does not say, cannot be read, or leaves a doubt."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return context_length(config) if isinstance(config, dict) else None


def context_length(config: Mapping[str, Any]) -> int | None:
    """max_position_embeddings (of text_config where there is one) by the factor of its rotary embedding's scaling."""
    text = config.get("text_config", config)
    length = text.get("max_position_embeddings") if isinstance(text, dict) else None
    if not isinstance(length, int) or length < 1 or text.get("model_max_length") is not None:
        return None
    ropes = [_rope(text.get(key)) for key in ("rope_parameters", "rope_scaling")]
    kind, factor = next((rope for rope in ropes if rope[0] != "default"), ropes[0])
    if kind in _SCALED_ALREADY:
        return length
    return int(length * factor) if kind in _SCALED_BY_FACTOR and factor is not None else None


def _rope(scaling: Any) -> tuple[str, float | None]:
    """Kind and factor of a `rope_scaling` or `rope_parameters`; ("unknown", None) for one by layer type."""
    if not scaling:
        return "default", None
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        return "unknown", None
    factor = scaling.get("factor")
    return str(scaling.get("rope_type", scaling.get("type", "default"))), (
        float(factor) if isinstance(factor, int | float) else None
    )
