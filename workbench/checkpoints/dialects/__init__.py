"""Dialects: how each producer writes a checkpoint. A new one is a file here and a line in `DIALECTS`."""

from __future__ import annotations

from workbench.errors import CheckpointError

from ..files import Folder, Problem
from .awq import Awq
from .base import Declaration, Dialect, Located, Written, find_config_block
from .compressed_tensors import CompressedTensors
from .deepseek_fp8 import DeepSeekFp8
from .gpt_oss import GptOss
from .gptq import Gptq
from .modelopt import ModelOpt
from .plain import Plain
from .quark import Quark
from .torchao import TorchAo

DIALECTS: dict[str, Dialect] = {
    d.name: d
    for d in (
        ModelOpt(),
        CompressedTensors(),
        GptOss(),
        Quark(),
        DeepSeekFp8(),
        Gptq(),
        Awq(),
        TorchAo(),
        Plain(),
    )
}

__all__ = ["DIALECTS", "Declaration", "Dialect", "Located", "Written", "choose_dialect", "get_dialect"]


def get_dialect(name: str) -> Dialect:
    """The dialect called `name`. Raises CheckpointError naming the choices."""
    if name not in DIALECTS:
        raise CheckpointError(f"unknown dialect {name!r}", fix=f"choose one of: {', '.join(DIALECTS)}")
    return DIALECTS[name]


def choose_dialect(folder: Folder) -> Dialect:
    """The dialect a folder is written in: its config's word first, then the tensors' signature.

    Raises CheckpointError for a quant_method that no dialect claims.
    """
    for dialect in DIALECTS.values():
        if dialect.detect(folder):
            return dialect
    block = find_config_block(folder.config)
    if block is not None:
        method = block.get("quant_method")
        raise CheckpointError(
            f"{folder.path / 'config.json'}: quantization_config.quant_method is {method!r}, which this version does"
            " not read",
            fix=f"known: {', '.join(d for d in DIALECTS if d != 'plain')}; without a quantization_config: plain",
        )
    for dialect in DIALECTS.values():
        if dialect.detect_tensors(folder):
            folder.problems.append(
                Problem(
                    "exclude-conflict",
                    "warning",
                    f"the tensors are {dialect.name}'s, but config.json has no quantization_config: a server would load"
                    " packed bytes as weights",
                    file="config.json",
                    fix="restore the producer's quantization_config",
                )
            )
            return dialect
    return DIALECTS["plain"]
