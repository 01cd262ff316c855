"""quant_method "fp8": every layout that DeepSeek, Qwen, GLM, MiniMax, Quark and NVIDIA publish under that name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from workbench.checkpoints import matches_any, open_checkpoint
from workbench.checkpoints.dialects import choose_dialect, get_dialect
from workbench.checkpoints.dialects.deepseek_fp8 import translate_skip_list
from workbench.checkpoints.files import Folder
from workbench.errors import CheckpointError
from workbench.formats import QuantizedTensor, quantize

V3 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
V4 = {**V3, "scale_fmt": "ue8m0"}
PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
Q = "model.layers.0.self_attn.q_proj"


def write(path: Path, tensors: dict[str, torch.Tensor], block: dict[str, Any] | None, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    content = {"hidden_size": 256, **config, **({"quantization_config": block} if block else {})}
    (path / "config.json").write_text(json.dumps(content))
    return path


def fp8(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.float8_e4m3fn)


def codes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def powers(*shape: int) -> torch.Tensor:
    """E8M0 bytes around 127."""
    return torch.randint(110, 130, shape, generator=torch.Generator().manual_seed(2), dtype=torch.uint8)


def scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)) + 0.01


def spread(s: torch.Tensor, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    """One scale an element, by index: row r lies in block row r // 128, whatever the last block's size."""
    rows, columns = torch.arange(shape[0]) // block[0], torch.arange(shape[1]) // block[1]
    return s[rows][:, columns]


def read_one(path: Path, name: str = Q + ".weight") -> QuantizedTensor:
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.dialect == "deepseek_fp8"
        q = checkpoint.read(name)
    assert isinstance(q, QuantizedTensor)
    return q


def refused(path: Path, *fragments: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    for fragment in fragments:
        assert fragment in caught.value.message, caught.value.message
    assert caught.value.fix


# ---- blocks ----------------------------------------------------------------------------------------------------------


def test_scale_inv_multiplies_and_partial_blocks_count(tmp_path):
    """576 rows are four blocks of 128 and one of 64: rows 512 to 575 take scale row 4. Weight and scale lie in
    different shards."""
    w, s = fp8(576, 256), scales(5, 2)
    path = write(tmp_path, {Q + ".weight": w}, V3)
    save_file({Q + ".weight_scale_inv": s}, path / "scales.safetensors")
    q = read_one(path)
    assert (q.format, q.block, q.shape) == ("fp8_block", (128, 128), (576, 256))
    assert torch.equal(q.dequantize(), w.float() * spread(s, (128, 128), (576, 256)))
    assert torch.equal(q.dequantize()[512:, :128], w.float()[512:, :128] * s[4, 0])


@pytest.mark.parametrize("name", ["weight_scale_inv", "scale"])
@pytest.mark.parametrize("dtype", ["F32", "F8_E8M0", "U8"])
def test_ue8m0_scales_in_any_dtype(tmp_path, name, dtype):
    """V3.1 writes powers of two as F32, V4 as F8_E8M0; a byte is never a number."""
    w, b = fp8(130, 256), powers(2, 2)
    values = torch.exp2(b.float() - 127)
    stored = {"F32": values, "F8_E8M0": b.view(torch.float8_e8m0fnu), "U8": b}[dtype]
    q = read_one(write(tmp_path, {f"{Q}.weight": w, f"{Q}.{name}": stored}, V4))
    assert (q.format, q.block) == ("fp8_block", (128, 128))
    assert torch.equal(q.dequantize(), w.float() * spread(values, (128, 128), (130, 256)))


def test_bf16_scales_are_exact_in_float32(tmp_path):
    w, s = fp8(128, 128), scales(1, 1).bfloat16()
    q = read_one(write(tmp_path, {Q + ".weight": w, Q + ".weight_scale_inv": s}, V3))
    assert torch.equal(q.dequantize(), w.float() * s.float())


@pytest.mark.parametrize(("n", "k", "shape"), [(576, 256, (5, 2)), (1000, 128, (8, 1)), (4544, 256, (36, 2))])
def test_the_block_is_no_quotient_of_the_shapes(tmp_path, n, k, shape):
    """Without weight_block_size: 1000 rows in 8 blocks are blocks of 128, not of 125; and a warning says so."""
    w, s = fp8(n, k), scales(*shape)
    block = {key: v for key, v in V3.items() if key != "weight_block_size"}
    path = write(tmp_path, {Q + ".weight": w, Q + ".weight_scale_inv": s}, block)
    assert torch.equal(read_one(path).dequantize(), w.float() * spread(s, (128, 128), (n, k)))
    with open_checkpoint(path) as checkpoint:
        assert [(p.check, p.severity) for p in checkpoint.problems] == [("config-conflict", "warning")]
        assert "gives no weight_block_size" in checkpoint.problems[0].message


@given(
    n=st.integers(1, 300),
    k=st.integers(1, 300),
    rows=st.sampled_from([1, 32, 64, 128]),
    columns=st.sampled_from([32, 64, 128]),
)
@settings(max_examples=40, deadline=None)
def test_a_block_found_from_shapes_decodes_as_the_true_one(tmp_path_factory, n, k, rows, columns):
    s = scales(-(-n // rows), -(-k // columns))
    w = fp8(n, k)
    path = write(tmp_path_factory.mktemp("b"), {Q + ".weight": w, Q + ".weight_scale_inv": s}, {"quant_method": "fp8"})
    assert torch.equal(read_one(path).dequantize(), w.float() * spread(s, (rows, columns), (n, k)))


def test_tensors_decide_over_the_configs_block_and_the_conflict_is_told(tmp_path):
    w, s = fp8(256, 256), scales(4, 4)
    path = write(tmp_path, {Q + ".weight": w, Q + ".weight_scale_inv": s}, V3)
    q = read_one(path)
    assert q.block == (64, 64)
    assert torch.equal(q.dequantize(), w.float() * spread(s, (64, 64), (256, 256)))
    with open_checkpoint(path) as checkpoint:
        (problem,) = checkpoint.problems
        assert "says blocks of [128, 128]" in problem.message
        assert "blocks of [64, 64]" in problem.message


def test_surplus_scale_columns_are_refused(tmp_path):
    """258 columns gathered from two shards of 129: four scale columns instead of three, which cannot be cut."""
    tensors = {Q + ".weight": fp8(128, 258), Q + ".weight_scale_inv": scales(1, 4)}
    refused(write(tmp_path, tensors, V3), "[128, 258]", "[1, 4], expected [1, 3] (blocks of [128, 128])")


# ---- other formats under quant_method fp8 ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_minimax_mxfp8(tmp_path, dtype):
    """Scale byte 118 is 2**-9, not 118."""
    w, b = fp8(6, 64), torch.full((6, 2), 118, dtype=torch.uint8)
    path = write(
        tmp_path, {Q + ".weight": w, Q + ".weight_scale_inv": b.view(dtype)}, {**V3, "weight_block_size": [1, 32]}
    )
    q = read_one(path)
    assert (q.format, q.block) == ("mxfp8_e4m3", (1, 32))
    assert torch.equal(q.dequantize(), w.float() * 2.0**-9)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.declaration.format == "mxfp8_e4m3"
        assert checkpoint.problems == ()


@pytest.mark.parametrize(
    ("scale", "format"), [(scales(1)[0], "fp8_tensor"), (scales(1), "fp8_tensor"), (scales(6, 1), "fp8_channel")]
)
def test_static_fp8_of_quark(tmp_path, scale, format):
    w = fp8(6, 64)
    tensors = {Q + ".weight": w, Q + ".weight_scale": scale, Q + ".input_scale": torch.tensor(0.5)}
    path = write(tmp_path, tensors, PER_TENSOR)
    q = read_one(path)
    assert q.format == format
    assert torch.equal(q.dequantize(), w.float() * scale)
    assert torch.equal(q.input_scale, torch.tensor(0.5))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.problems == ()
        assert not checkpoint.declaration.expects_quantized("lm_head")


def test_deepseek_v4_packs_its_experts_in_mxfp4(tmp_path):
    """I8 bytes are two codes, not integers: 0xF9 is a byte below zero, and -6 and -0.5."""
    w1 = "layers.0.ffn.experts.3.w1"
    packed = codes(4, 32)
    packed[0, 0] = 0xF9
    tensors = {
        w1 + ".weight": packed.view(torch.int8),
        w1 + ".scale": powers(4, 2).view(torch.float8_e8m0fnu),
        "layers.0.attn.wo_b.weight": fp8(128, 256),
        "layers.0.attn.wo_b.scale": powers(1, 2).view(torch.float8_e8m0fnu),
        "layers.0.hc_attn_scale": torch.ones(3),
        "embed.weight": torch.ones(2, 256).bfloat16(),
    }
    path = write(tmp_path, tensors, V4, expert_dtype="fp4")
    q = read_one(path, w1 + ".weight")
    assert (q.format, q.shape, q.codes.dtype) == ("mxfp4", (4, 64), torch.uint8)
    assert torch.equal(q.codes, packed)
    assert torch.equal(q.block_scales, powers(4, 2))
    assert q.dequantize()[0, :2].tolist() == [
        -0.5 * 2.0 ** (int(powers(4, 2)[0, 0]) - 127),
        -6.0 * 2.0 ** (int(powers(4, 2)[0, 0]) - 127),
    ]
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.problems == ()
        entry = checkpoint.entry(w1 + ".weight")
        assert (entry.layer, entry.expert, entry.projection) == (0, 3, "w1")
        assert checkpoint.entry("layers.0.attn.wo_b.weight").format == "fp8_block"
        assert checkpoint.entry("layers.0.hc_attn_scale").format == "f32"
        declared = checkpoint.declaration
        assert declared.format_of("layers.0.ffn.experts.3.w1") == "mxfp4"
        assert declared.format_of("layers.0.ffn.shared_experts.w1") == "fp8_block"
        assert declared.format_of("layers.0.attn.wo_b") == "fp8_block"


def test_nvidia_v4_nvfp4_experts_beside_fp8(tmp_path):
    w2, q4 = (
        "layers.0.ffn.experts.0.w2",
        quantize(torch.randn(4, 64, generator=torch.Generator().manual_seed(5)), "nvfp4"),
    )
    tensors = {
        w2 + ".weight": q4.codes,
        w2 + ".weight_scale": q4.block_scales,
        w2 + ".weight_scale_2": q4.global_scale,
        w2 + ".input_scale": torch.tensor(0.25),
        "layers.0.attn.wkv.weight": fp8(128, 256),
        "layers.0.attn.wkv.scale": powers(1, 2).view(torch.float8_e8m0fnu),
    }
    block = {
        **V4,
        "quant_algo": "MIXED_PRECISION",
        "ignore": ["*.attn.*"],
        "quantized_layers": {"layers.0.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16}},
    }
    path = write(tmp_path, tensors, block, expert_dtype="fp4")
    q = read_one(path, w2 + ".weight")
    assert q.format == "nvfp4"
    assert torch.equal(q.dequantize(), q4.dequantize())
    assert torch.equal(q.input_scale, torch.tensor(0.25))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.entry("layers.0.attn.wkv.weight").format == "fp8_block"
        assert checkpoint.declaration.format_of("layers.0.ffn.experts.0.w2") == "nvfp4"
        assert checkpoint.declaration.format_of("layers.0.attn.wkv") == "fp8_block"


# ---- stacks ----------------------------------------------------------------------------------------------------------


def test_fp8_expert_stacks_of_transformers_5(tmp_path):
    """gate_up_proj [E, 2I, H] with gate_up_proj_scale_inv: gate's scales are the upper half of the rows."""
    base, experts, inner, hidden = "model.layers.0.mlp.experts", 2, 128, 256
    w, s = fp8(experts, 2 * inner, hidden), scales(experts, 2, 2)
    tensors = {
        base + ".gate_up_proj": w,
        base + ".gate_up_proj_scale_inv": s,
        base + ".gate_up_proj_activation_scale": torch.tensor([0.5, 0.25]),
        base + ".down_proj": fp8(experts, hidden, inner),
        base + ".down_proj_scale_inv": scales(experts, 2, 1),
    }
    path = write(tmp_path, tensors, V3)
    up = read_one(path, base + ".1.up_proj.weight")
    assert up.format == "fp8_block"
    assert torch.equal(up.dequantize(), w[1, inner:].float() * spread(s[1, 1:], (128, 128), (inner, hidden)))
    assert torch.equal(up.input_scale, torch.tensor(0.25))
    down = read_one(path, base + ".0.down_proj.weight")
    expected = tensors[base + ".down_proj"][0].float() * spread(scales(experts, 2, 1)[0], (128, 128), (hidden, inner))
    assert torch.equal(down.dequantize(), expected)
    with open_checkpoint(path) as checkpoint:
        assert len(checkpoint.entries()) == 6
        assert checkpoint.problems == ()


def test_short_halves_may_have_a_scale_each(tmp_path):
    """I = 64: one block of 128 would hold both halves, but two rows of scales are stored: gate's and up's."""
    base = "model.layers.0.mlp.experts"
    w, s = fp8(2, 128, 256), scales(2, 2, 2)
    path = write(tmp_path, {base + ".gate_up_proj": w, base + ".gate_up_proj_scale_inv": s}, V3)
    up = read_one(path, base + ".1.up_proj.weight")
    assert torch.equal(up.dequantize(), w[1, 64:].float() * spread(s[1, 1:], (128, 128), (64, 256)))


def test_packed_fp4_and_per_tensor_expert_stacks(tmp_path):
    base = "model.layers.0.mlp.experts"
    packed, b = codes(2, 64, 128).view(torch.int8), powers(2, 64, 8)
    tensors = {base + ".gate_up_proj": packed, base + ".gate_up_proj_scale_inv": b.view(torch.float8_e8m0fnu)}
    q = read_one(write(tmp_path / "fp4", tensors, V4), base + ".1.gate_proj.weight")
    assert (q.format, q.shape) == ("mxfp4", (32, 256))
    assert torch.equal(q.codes, packed[1, :32].view(torch.uint8))
    assert torch.equal(q.block_scales, b[1, :32])
    w, s = fp8(2, 256, 64), scales(2)
    tensors = {base + ".down_proj": w, base + ".down_proj_scale_inv": s}
    q = read_one(write(tmp_path / "fp8", tensors, PER_TENSOR), base + ".1.down_proj.weight")
    assert q.format == "fp8_tensor"
    assert torch.equal(q.dequantize(), w[1].float() * s[1])


def test_step_stacks(tmp_path):
    name = "model.layers.3.moe.gate_proj.weight"
    w, s = fp8(2, 128, 256), scales(2, 1, 2)
    path = write(tmp_path, {name: w, name + "_scale_inv": s}, V3)
    q = read_one(path, "model.layers.3.moe.experts.1.gate_proj.weight")
    assert torch.equal(q.dequantize(), w[1].float() * spread(s[1], (128, 128), (128, 256)))


@pytest.mark.parametrize(("inner", "rows"), [(192, 3), (96, 2)])
def test_a_scale_block_across_gate_and_up_is_refused(tmp_path, inner, rows):
    """With I = 96 the two scale rows may be gate's and up's, or the blocks 0:128 and 128:192: it cannot be told."""
    base = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {base: fp8(2, 2 * inner, 256), base + "_scale_inv": scales(2, rows, 2)}
    refused(write(tmp_path, tensors, V3), "gate_up_proj", "a block lies across gate and up")


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "fragments"),
    [
        ({".weight": fp8(128, 128)}, ["q_proj.weight is F8_E4M3", "no scale of it is in any shard"]),
        ({".weight": codes(4, 16).view(torch.int8)}, ["q_proj.weight is I8", "no scale of it"]),
        ({".weight": codes(4, 16).view(torch.int8), ".weight_scale": scales(4, 1)}, ["expected E8M0 [4, 1] (mxfp4)"]),
        ({".weight": codes(4, 16), ".weight_scale": fp8(4, 2)}, ["weight_scale_2 (nvfp4)"]),
        ({".weight": fp8(128, 128), ".weight_scale_inv": scales(3, 3)}, ["[3, 3], expected [1, 1]"]),
        ({".weight": fp8(128, 128), ".scale": scales(1, 1), ".weight_scale": scales(1, 1)}, ["cannot be told"]),
        ({".weight": fp8(128, 128), ".scale": scales(1, 1), ".input_scale": scales(2)}, ["expected single floats"]),
        ({".weight": fp8(128, 128), ".scale": scales(1, 1), ".weight_scale_2": scales(1)}, ["no FP8 scale"]),
        ({".weight": fp8(128, 128), ".weight_scale_inv": torch.ones(1, 1, dtype=torch.int32)}, ["no FP8 scale"]),
        ({".weight_scale_inv": scales(1, 1)}, ["weight_scale_inv"]),
        ({".weight": powers(4, 64).view(torch.float8_e8m0fnu), ".weight_scale": powers(4, 2)}, ["no FP8 scale"]),
        ({".weight": fp8(2, 128, 128), ".weight_scale_inv": scales(2, 1, 1)}, ["expected a matrix"]),
        (
            {".weight": fp8(4, 64).float().to(torch.float8_e5m2), ".weight_scale": scales(1)},
            ["F8_E5M2 is known with E8M0 scales"],
        ),
    ],
)
def test_what_has_no_meaning_is_refused(tmp_path, tensors, fragments):
    refused(write(tmp_path, {Q + suffix: t for suffix, t in tensors.items()}, V3), *fragments)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({**V3, "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({**V3, "weight_block_size": [128]}, "weight_block_size is [128]"),
        ({**V3, "weight_block_size": [128, 0]}, "expected two positive whole"),
        ({**V3, "weight_block_size": [1 << 40, 1]}, "expected two positive whole"),
        ({**V3, "fmt": ["e4m3"]}, "fmt is ['e4m3']"),
        ({**V3, "ignored_layers": "lm_head"}, "ignored_layers is 'lm_head'"),
        ({**V3, "quantized_layers": {"a": {"quant_algo": "W3A7"}}}, "'W3A7'"),
        ({**V3, "quantized_layers": ["a"]}, "quantized_layers is no table"),
    ],
)
def test_configs_that_make_no_sense_are_refused(tmp_path, block, message):
    refused(write(tmp_path, {"model.norm.weight": torch.ones(2)}, block), message)


def test_known_by_its_tensors_when_the_config_says_nothing(tmp_path):
    path = write(tmp_path, {"a.wo_b.weight": fp8(4, 4), "a.wo_b.scale": powers(1, 1).view(torch.float8_e8m0fnu)}, None)
    q = read_one(path, "a.wo_b.weight")
    assert torch.equal(q.dequantize(), fp8(4, 4).float() * torch.exp2(powers(1, 1).float() - 127))


def test_nothing_is_written():
    with pytest.raises(CheckpointError, match="read, not written"):
        get_dialect("deepseek_fp8").disassemble("a.weight", quantize(torch.ones(2, 32), "mxfp4"))


# ---- skip lists and published configs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "module", "covered"),
    [
        ("gate", "model.layers.0.block_sparse_moe.gate", True),  # MiniMax: a short name, wherever it ends one
        ("gate", "model.layers.0.mlp.gate_proj", False),
        ("gate", "model.layers.0.mlp.shared_expert_gate", False),
        ("lm_head", "language_model.lm_head", True),
        ("vision_tower", "model.vision_tower.blocks.0.fc1", True),
        ("model.layers.1.mlp.gate", "model.layers.1.mlp.gate", True),
        ("model.layers.1", "model.layers.12.mlp.gate", False),
        ("self_attn.qkv_proj", "model.layers.0.self_attn.qkv_proj", True),
        ("model.layers.*.self_attn", "model.layers.7.self_attn.q_proj", True),
        ("model.layers.*.self_attn", "model.layers.7.mlp.q_proj", False),
        ("re:.*visual.*", "model.visual.blocks.0", True),
    ],
)
def test_skip_lists_mean_what_transformers_reads(entry, module, covered):
    assert matches_any(module, translate_skip_list([entry])) is covered


PUBLISHED = {
    "deepseek-ai--DeepSeek-V3": "fp8_block",
    "deepseek-ai--DeepSeek-R1": "fp8_block",
    "deepseek-ai--DeepSeek-V3.2": "fp8_block",
    "deepseek-ai--DeepSeek-V4-Flash": "fp8_block",
    "sgl-project--DeepSeek-V4-Flash-FP8": "fp8_block",
    "sgl-project--DeepSeek-V4-Pro-FP8": "fp8_block",
    "moonshotai--Kimi-K2-Instruct": "fp8_block",
    "MiniMaxAI--MiniMax-M2.5": "fp8_block",
    "MiniMaxAI--MiniMax-M2.7": "fp8_block",
    "Qwen--Qwen3-235B-A22B-FP8": "fp8_block",
    "Qwen--Qwen3-30B-A3B-FP8": "fp8_block",
    "XiaomiMiMo--MiMo-V2-Flash": "fp8_block",
    "zai-org--GLM-5-FP8": "fp8_block",
    "zai-org--GLM-5.1-FP8": "fp8_block",
    "nvidia--DeepSeek-V4-Pro-NVFP4": "fp8_block",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(shared_data, name):
    config = json.loads((shared_data / "metadata" / f"{name}_config.json").read_text())
    folder = Folder(path=Path(), tensors={}, config=config, files=(), headers={})
    dialect = choose_dialect(folder)
    declared = dialect.declare(folder)
    assert dialect.name == "deepseek_fp8"
    assert declared.format_of("model.layers.5.self_attn.o_proj") == PUBLISHED[name]
    expert = declared.format_of("layers.5.ffn.experts.7.w1")
    if name == "nvidia--DeepSeek-V4-Pro-NVFP4":
        assert (declared.algorithm, expert) == ("MIXED_PRECISION", "nvfp4")
        assert declared.format_of("layers.5.attn.wo_b") == "fp8_block"  # its `ignore` means "stays FP8"
    elif name == "deepseek-ai--DeepSeek-V4-Flash":
        assert (declared.algorithm, expert) == ("FP8", "mxfp4")
    else:
        assert (declared.algorithm, expert) == ("FP8", "fp8_block")
    for dense in ("model.layers.61.eh_proj", "model.layers.5.self_attn.indexer.weights_proj"):
        assert not declared.expects_quantized(dense)
    if "MiniMax" in name:
        assert not declared.expects_quantized("model.layers.5.block_sparse_moe.gate")
    if "GLM" in name or "Qwen" in name:
        assert not declared.expects_quantized("model.layers.5.mlp.gate")
        assert declared.expects_quantized("model.layers.5.mlp.experts.3.gate_proj")
