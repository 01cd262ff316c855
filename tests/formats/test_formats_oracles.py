"""Each producer's rule on the models that its exports were made from: every code, scale, zero point and global scale.

The exports are read by the dialects, so that one comparison of canonical tensors serves all.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.names import fusion_group
from workbench.checkpoints.open import Checkpoint
from workbench.formats import QuantizedTensor, get_format, global_scale, quantize

# export, rule, which fused projections share one scale: all of them, or none
EXPORTS = [
    ("modelopt--nvfp4_default--qwen3moe", "modelopt", True),
    ("modelopt--w4a16_nvfp4--llama", "modelopt", True),
    ("modelopt--kvfp8--llama", "modelopt", True),
    ("modelopt--w4a8_nvfp4_fp8--llama", "modelopt", True),
    ("modelopt--mxfp4_default--llama", "modelopt", False),
    ("modelopt--mxfp8_default--llama", "modelopt", False),
    ("modelopt--fp8_2d_blockwise_weight_only--llama", "modelopt", False),
    ("modelopt--mixed3--qwen3moe", "modelopt", True),
    ("llmcompressor--nvfp4--llama", "llm_compressor", True),
    ("llmcompressor--nvfp4a16--qwen3moe", "llm_compressor", True),
    ("llmcompressor--mxfp4--llama", "llm_compressor", False),
    ("llmcompressor--fp8_block--llama", "llm_compressor", False),
    ("llmcompressor--mixed--qwen3moe", "llm_compressor", True),
    ("llmcompressor--w8a8--llama", "llm_compressor", False),
    ("llmcompressor--w4a16--llama", "llm_compressor", False),
    ("llmcompressor--w4a16g32asym--llama", "llm_compressor_asym", False),
    ("quark--nvfp4--llama", "quark", True),
    ("quark--mxfp4--llama", "quark", False),
    ("quark--int4_wo_32--llama", "quark", False),
    ("quark-f2f--nvfp4--qwen3moe", "quark_f2f", False),
    ("quark-f2f--mxfp4--llama", "quark", False),
    ("quark-f2f--mxfp6_e3m2--llama", "quark", False),
    ("quark-f2f--int4_wo_32--llama", "quark_f2f", False),
    ("quark-f2f--int4_fp8--llama", "quark_f2f", False),
    ("torchao--mxfp4wo--llama", "torchao", False),
]


@pytest.mark.parametrize(("export", "rule", "shared"), EXPORTS, ids=[e for e, _, _ in EXPORTS])
def test_every_byte_of_the_export(oracles: Path, export: str, rule: str, shared: bool) -> None:
    compared = 0
    with open_source(oracles, export) as source, open_checkpoint(oracles / export) as theirs:
        for entry in theirs.entries():
            if not entry.quantized:
                continue
            want = theirs.read(entry.name)
            assert isinstance(want, QuantizedTensor)
            w = source.read(entry.name)
            fused = shared_scale(source, theirs, entry.name, rule) if shared and want.spec.has_global else None
            assert_same(quantize(w, want.format, rule, block=want.block, global_scale=fused), want, entry.name)
            compared += 1
    assert compared >= 14


def test_modelopt_fp8_shares_the_scale_of_an_experts_gate_and_up(oracles: Path) -> None:
    export = "modelopt--fp8_default--qwen3moe"
    with open_source(oracles, export) as source, open_checkpoint(oracles / export) as theirs:
        for entry in theirs.entries():
            if entry.quantized:
                want = theirs.read(entry.name)
                fused = shared_scale(source, theirs, entry.name, "modelopt") if ".experts." in entry.name else None
                got = quantize(source.read(entry.name), "fp8_tensor", "modelopt", global_scale=fused)
                assert_same(got, want, entry.name)


def test_only_an_all_zero_matrix_differs_from_modelopt(oracles: Path) -> None:
    """ModelOpt divides by its zero global scale there: NaN scales. Ours decodes to zeros."""
    export, zero = "modelopt--nvfp4_default--llamazero", 0
    with open_checkpoint(oracles / export) as theirs:
        for entry in theirs.entries():
            if entry.quantized:
                want = theirs.read(entry.name)
                if bool(want.dequantize().isnan().any()):
                    ours = quantize(torch.zeros(want.shape), "nvfp4", "modelopt")
                    assert torch.count_nonzero(ours.dequantize()) == 0
                    assert ours.global_scale == 1.0
                    zero += 1
    assert zero > 0


def open_source(oracles: Path, export: str) -> Checkpoint:
    return open_checkpoint(oracles / f"source--{export.split('--')[-1]}")


def shared_scale(source: Checkpoint, theirs: Checkpoint, name: str, rule: str) -> Tensor | None:
    """The scale of the fused group that `name` is in, of those members that the export quantized in the same format."""
    entries = {e.name: e for e in theirs.entries() if e.quantized}
    group = fusion_group(entries[name].module)
    members = [e for e in entries.values() if fusion_group(e.module) == group and e.format == entries[name].format]
    if group is None or len(members) < 2 or get_format(entries[name].format).shared_scale is None:
        return None
    amax = torch.stack([source.read(e.name).abs().amax() for e in members]).amax()
    return global_scale(entries[name].format, rule, amax)


def assert_same(got: QuantizedTensor, want: QuantizedTensor, name: str) -> None:
    for part in ("codes", "block_scales", "zero_points", "global_scale"):
        ours, theirs = getattr(got, part), getattr(want, part)
        if part == "zero_points" and (ours is None or theirs is None):
            present = ours if theirs is None else theirs
            assert present is None or not bool(present.any()), (name, part)
            continue
        assert (ours is None) == (theirs is None), (name, part)
        if ours is not None:
            assert ours.dtype == theirs.dtype, (name, part)
            assert torch.equal(as_bytes(ours), as_bytes(theirs)), (name, part)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
