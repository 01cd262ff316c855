"""Sources as producers ship them (block FP8, INT4, gpt-oss) become what their decoded values quantize to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_checkpoints import tiny_tensors, write_checkpoint

from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.convert import quantize_checkpoint
from workbench.checkpoints.dialects import DIALECTS
from workbench.errors import ConfigError
from workbench.formats import quantize

EXPERT = "model.layers.1.mlp.experts.2."
ORACLES = [
    *("llmcompressor--fp8_block--llama", "llmcompressor--mixed--qwen3moe", "llmcompressor--mxfp4--llama"),
    *("llmcompressor--nvfp4--llama", "llmcompressor--nvfp4a16--qwen3moe", "llmcompressor--w4a16--llama"),
    *(
        "llmcompressor--w4a16g32asym--llama",
        "llmcompressor--w8a8--llama",
        "modelopt--fp8_2d_blockwise_weight_only--llama",
    ),
    *("modelopt--fp8_default--qwen3moe", "modelopt--int4_awq--llama", "modelopt--kvfp8--llama"),
    *("modelopt--mixed3--qwen3moe", "modelopt--mxfp4_default--llama", "modelopt--mxfp8_default--llama"),
    *("modelopt--nvfp4_default--qwen3moe", "modelopt--w4a16_nvfp4--llama", "modelopt--w4a8_nvfp4_fp8--llama"),
    *("quark--int4_wo_32--llama", "quark--mxfp4--llama", "quark--nvfp4--llama", "quark-f2f--int4_fp8--llama"),
    *("quark-f2f--int4_wo_32--llama", "quark-f2f--mxfp4--llama", "quark-f2f--mxfp6_e3m2--llama"),
    *("quark-f2f--nvfp4--qwen3moe", "torchao--mxfp4wo--llama"),
]


def fp8_blocks(w_nk: torch.Tensor, size: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek's block FP8: codes and `weight_scale_inv` (which multiplies), partial last blocks included."""
    n, k = w_nk.shape
    scales = torch.zeros(-(-n // size), -(-k // size))
    codes = torch.zeros(n, k, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            rows, columns = slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size)
            scales[i, j] = w_nk[rows, columns].float().abs().max() / 448
            codes[rows, columns] = (w_nk[rows, columns].float() / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


def check(source: Path, values: dict[str, torch.Tensor], tmp_path: Path, *exclude: str) -> None:
    """The source decodes to `values`, and converts to what these quantize to (each with its own global scale)."""
    quantize_checkpoint(source, tmp_path / "f32", format="f32", dialect="plain")
    quantize_checkpoint(
        source,
        tmp_path / "nv",
        format="nvfp4",
        dialect="modelopt",
        exclude=exclude,
        rule="four_over_six",
        shared_globals=False,
    )
    with open_checkpoint(tmp_path / "f32") as dense, open_checkpoint(tmp_path / "nv") as nvfp4:
        for name, expected in values.items():
            assert torch.equal(dense.read_dense(name), expected), name
            assert torch.equal(nvfp4.read_dense(name), quantize(expected, "nvfp4", "four_over_six").dequantize()), name


def test_deepseek_block_fp8(tmp_path):
    generator = torch.Generator().manual_seed(1)
    tensors, values = tiny_tensors(), {}
    for name in ("model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"):
        w_nk = torch.randn(200, 160, generator=generator) * 0.02
        codes, scales = fp8_blocks(w_nk)
        tensors[name + ".weight"], tensors[name + ".weight_scale_inv"] = codes, scales
        spread = scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :160]
        values[name + ".weight"] = codes.float() * spread
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    source = write_checkpoint(tmp_path / "fp8", tensors, quantization_config=config)
    check(source, values, tmp_path)


def test_kimi_int4(plain, tmp_path):
    """Routed experts in INT4, groups of 32, as Kimi-K2's releases have them (pack-quantized)."""
    quantize_checkpoint(
        plain,
        tmp_path / "int4",
        format="int4_group",
        dialect="compressed_tensors",
        block=(1, 32),
        weight_only=True,
        include=["*.mlp.experts.*"],
    )
    expected = quantize(tiny_tensors()[EXPERT + "up_proj.weight"], "int4_group", block=(1, 32)).dequantize()
    check(tmp_path / "int4", {EXPERT + "up_proj.weight": expected}, tmp_path)


def test_fp8_per_tensor(plain, tmp_path):
    quantize_checkpoint(plain, tmp_path / "fp8", format="fp8_tensor", dialect="modelopt")
    expected = quantize(tiny_tensors()[EXPERT + "up_proj.weight"], "fp8_tensor").dequantize()
    check(tmp_path / "fp8", {EXPERT + "up_proj.weight": expected}, tmp_path)


def test_gpt_oss_stacks(tmp_path):
    source = write_checkpoint(tmp_path / "source", tiny_tensors(), model_type="gpt_oss")
    others = ["*self_attn*", "*shared_experts*", "model.layers.0.*"]
    quantize_checkpoint(source, tmp_path / "oss", format="mxfp4", dialect="gpt_oss", exclude=others)
    name = EXPERT + "gate_proj.weight"
    check(tmp_path / "oss", {name: quantize(tiny_tensors()[name], "mxfp4").dequantize()}, tmp_path)


@pytest.mark.parametrize("name", ORACLES)
def test_every_producers_export_converts(shared_data, tmp_path, name):
    """To f32 as the reader decodes it, and to NVFP4 and MXFP4 with an error that these formats may have."""
    source = shared_data / "oracles" / name
    quantize_checkpoint(source, tmp_path / "f32", format="f32", dialect="plain")
    for format, dialect in (("nvfp4", "compressed_tensors"), ("mxfp4", "quark")):
        result = quantize_checkpoint(
            source, tmp_path / format, format=format, dialect=dialect, include=["*layers.1.*down_proj"]
        )
        with (
            open_checkpoint(source) as packed,
            open_checkpoint(tmp_path / "f32") as dense,
            open_checkpoint(tmp_path / format) as written,
        ):
            assert not written.problems
            assert result.quantized or result.copied
            for tensor in result.quantized:
                value = packed.read_dense(tensor)
                assert torch.equal(dense.read_dense(tensor), value)
                error = float((written.read_dense(tensor) - value).square().sum())
                assert error <= 0.05 * float(value.square().sum()), tensor


@pytest.mark.parametrize("dialect", [d.name for d in DIALECTS.values() if not d.writes])
def test_a_dialect_that_is_only_read_is_no_target(plain, tmp_path, dialect):
    with pytest.raises(ConfigError, match=f"the {dialect} dialect writes nothing"):
        quantize_checkpoint(plain, tmp_path / "q", format="nvfp4", dialect=dialect)
