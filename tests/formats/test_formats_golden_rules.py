"""Producers' rules against what the producers' own functions gave for chosen awkward rows (make_golden_rules.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.formats import FORMATS, quantize

GOLDEN = json.loads((Path(__file__).parent / "golden_rules.json").read_text())
CASES = GOLDEN["cases"]
BLOCKS = {"fp8_block": (4, 32), "int4_group": (1, 32), "int8_group": (1, 32)}


def unhex(text: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8).clone().view(dtype)


def golden_input(name: str) -> torch.Tensor:
    stored = GOLDEN["inputs"][name]
    return unhex(stored["hex"], getattr(torch, stored["dtype"].removeprefix("torch."))).reshape(stored["shape"])


@pytest.mark.parametrize("case", CASES, ids=[f"{c['format']}-{c['rule']}-{c['input']}" for c in CASES])
@pytest.mark.parametrize("read_as", ["stored", "float32"])
def test_every_byte_is_the_tools(case: dict[str, Any], read_as: str) -> None:
    """Codes, scales, global scale, zero points (or the values); also for a tensor that was read as float32."""
    w = golden_input(case["input"])
    w = w.float() if read_as == "float32" else w
    q = quantize(w, case["format"], case["rule"], block=BLOCKS.get(case["format"]))
    if "values" in case:  # of a tool that keeps no codes
        assert torch.equal(q.dequantize(torch.float32).flatten(), unhex(case["values"], torch.float32))
        return
    assert q.codes.contiguous().view(torch.uint8).flatten().tolist() == unhex(case["codes"], torch.uint8).tolist()
    assert q.block_scales.view(torch.uint8).flatten().tolist() == unhex(case["block_scales"], torch.uint8).tolist()
    if "global_scale" in case:
        assert q.global_scale == unhex(case["global_scale"], torch.float32)
    if "divisor" in case:
        assert (1.0 / q.global_scale).float() == unhex(case["divisor"], torch.float32)
    if "zero_points" in case:
        assert q.zero_points.flatten().tolist() == unhex(case["zero_points"], torch.int32).tolist()


def test_every_producer_rule_has_a_golden_case() -> None:
    covered = {(c["format"], c["rule"]) for c in CASES}
    producers = {c["rule"] for c in CASES}
    offered = {(f.name, rule.value) for f in FORMATS.values() for rule in f.rules if rule.value in producers}
    assert offered - covered == {("int4_channel", "quark_f2f")}  # its oracle is a whole export: test_formats_oracles.py
