"""Reading compressed-tensors: config groups, targets, packings, divisors, and what is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from compressed_tensors_blocks import BYTES, FP8, INT4, MXFP4, NVFP4, PACKED, M, block, group
from tiny_checkpoints import write_checkpoint

from workbench.checkpoints import open_checkpoint
from workbench.errors import CheckpointError
from workbench.formats import QuantizedTensor

ORACLES = [
    "llmcompressor--fp8_block--llama",
    "llmcompressor--mixed--qwen3moe",
    "llmcompressor--mxfp4--llama",
    "llmcompressor--nvfp4--llama",
    "llmcompressor--nvfp4a16--qwen3moe",
    "llmcompressor--w4a16--llama",
    "llmcompressor--w4a16g32asym--llama",
    "llmcompressor--w8a8--llama",
]


def read_one(path: Path, tensors: dict[str, torch.Tensor], *groups: dict) -> QuantizedTensor:
    """`<M>.weight` of a checkpoint that holds `tensors`, named from the module on."""
    write_checkpoint(path, {f"{M}.{k}": t for k, t in tensors.items()}, quantization_config=block(*groups))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.dialect == "compressed_tensors"
        tensor = checkpoint.read(f"{M}.weight")
        assert isinstance(tensor, QuantizedTensor)
        return tensor


def sha256(value: torch.Tensor) -> str:
    return hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("name", ORACLES)
def test_every_tensor_decodes_to_the_tools_bytes(shared_data, name):
    """float32 before the tool rounds to bf16, and bf16 after."""
    oracle = json.loads((shared_data / "oracles" / name / "oracle.json").read_text())["tensors"]
    with open_checkpoint(shared_data / "oracles" / name) as checkpoint:
        assert checkpoint.problems == ()
        quantized = [e for e in checkpoint.entries() if e.quantized]
        assert {e.name for e in quantized} == set(oracle)
        for entry in quantized:
            assert checkpoint.declaration.format_of(entry.module) == entry.format
            value = checkpoint.read_dense(entry.name)
            assert list(value.shape) == oracle[entry.name]["shape"]
            assert sha256(value.bfloat16().float()) == oracle[entry.name]["sha256_tool"], entry.name
            assert sha256(value) == oracle[entry.name]["sha256_f32_le"], entry.name
        dense = [e for e in checkpoint.entries() if e.projection and not e.quantized]
        assert not any(checkpoint.declaration.expects_quantized(e.module) for e in dense if "norm" not in e.module)


# ---- Values ----------------------------------------------------------------------------------------------------------


def test_int4_words_are_offset_binary_lowest_first(tmp_path):
    """The word and its values as Kimi-K2's experts store them; two's complement would give 0, 1, 7, -8, ..."""
    word = torch.tensor([[0xBFE98710 - (1 << 32)]], dtype=torch.int32)
    tensors = {
        "weight_packed": word.expand(3, 4).contiguous(),
        "weight_scale": torch.tensor([[1.0], [0.5], [2.0]]).bfloat16(),
        "weight_shape": torch.tensor([3, 32]),
    }
    q = read_one(tmp_path / "c", tensors, group(**INT4, group_size=32))
    row = torch.tensor([-8.0, -7, -1, 0, 1, 6, 7, 3]).repeat(4)
    assert q.format == "int4_group"
    assert q.block == (1, 32)
    assert torch.equal(q.dequantize(), torch.stack([row, row * 0.5, row * 2]))


@pytest.mark.parametrize("bits", [4, 8])
def test_weight_shape_trims_the_last_word_and_zero_points_lie_along_the_rows(tmp_path, bits):
    """12 rows and 36 columns fill no whole number of words either way."""
    n, k, groups = 12, 36, 3
    generator = torch.Generator().manual_seed(bits)
    low, high = -(1 << (bits - 1)), 1 << (bits - 1)
    q_nk = torch.randint(low, high, (n, k), generator=generator)
    z = torch.randint(low, high, (n, groups), generator=generator)
    scale = torch.rand(n, groups, generator=generator).bfloat16()
    tensors = {
        "weight_packed": pack(q_nk, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor([n, k]),
        "weight_zero_point": pack(z.T, bits).T.contiguous(),
    }
    q = read_one(tmp_path / "c", tensors, group(num_bits=bits, type="int", strategy="group", group_size=12))
    expected = (q_nk - z.repeat_interleave(12, 1)).float() * scale.float().repeat_interleave(12, 1)
    assert q.format == ("int4_group" if bits == 4 else "int8_group")
    assert torch.equal(q.dequantize(), expected)


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Offset-binary words, one value after the other from the lowest bits, by arithmetic on Python integers."""
    per_word = 32 // bits
    rows = []
    for row in values.tolist():
        unsigned = [v + (1 << (bits - 1)) for v in row] + [0] * (-len(row) % per_word)
        words = [
            sum(v << (bits * i) for i, v in enumerate(unsigned[s : s + per_word]))
            for s in range(0, len(unsigned), per_word)
        ]
        rows.append([w - (1 << 32) if w >= 1 << 31 else w for w in words])
    return torch.tensor(rows, dtype=torch.int32)


def test_act_order_gives_each_column_its_group(tmp_path):
    codes = torch.arange(-8, 8).repeat(2, 1)
    index = torch.tensor([1, 0] * 8, dtype=torch.int32)
    tensors = {
        "weight_packed": pack(codes, 4),
        "weight_scale": torch.tensor([[1.0, 4.0], [2.0, 8.0]]),
        "weight_shape": torch.tensor([2, 16]),
        "weight_g_idx": index,
    }
    q = read_one(tmp_path / "c", tensors, group(**INT4, group_size=8))
    assert torch.equal(q.dequantize(), codes * tensors["weight_scale"][:, index.long()])
    tensors["weight_g_idx"] = torch.full((16,), -1, dtype=torch.int32)  # never set: the columns are in order
    q = read_one(tmp_path / "unset", tensors, group(**INT4, group_size=8))
    assert torch.equal(q.dequantize(), codes * tensors["weight_scale"].repeat_interleave(8, 1))


@pytest.mark.parametrize("index", [[0] * 15 + [1], [0, 1 << 30] * 8, [0, 1] * 7])
def test_a_group_index_that_is_no_even_split_is_refused(tmp_path, index):
    tensors = {
        "weight_packed": pack(torch.zeros(2, 16, dtype=torch.int64), 4),
        "weight_scale": torch.ones(2, 2),
        "weight_g_idx": torch.tensor(index, dtype=torch.int32),
    }
    with pytest.raises(CheckpointError, match=f"{M}.weight_g_idx does not give each of 2 groups"):
        read_one(tmp_path / "c", tensors, group(**INT4, group_size=8))


def test_global_scales_are_divisors_and_their_quotients_exact(tmp_path):
    """Gate 5000 and up 500 are the multipliers 2e-4 and 2e-3, and every value is code * (scale / divisor)."""
    scales = torch.arange(1, 127, dtype=torch.int32).to(torch.uint8)[:120].view(torch.float8_e4m3fn).reshape(12, 10)
    for number, divisor in enumerate((5000.0, 500.0, 419.59375, 3.1415927, 1e-30, 2.0**100)):
        tensors = {
            "weight_packed": torch.full((12, 80), 0x72, dtype=torch.uint8),  # 1.0, 6.0
            "weight_scale": scales,
            "weight_global_scale": torch.tensor([divisor]),
        }
        q = read_one(tmp_path / str(number), tensors, NVFP4)
        assert q.global_scale is not None
        step = scales.float() / torch.tensor(divisor)
        assert torch.equal((scales.double() * q.global_scale.double()).float(), step)
        value = q.dequantize().unflatten(-1, (-1, 16))
        assert torch.allclose(value[..., 0], step, rtol=2**-23, atol=0)
        assert torch.equal(value[..., 0].bfloat16(), step.bfloat16())
        assert torch.equal(value[..., 1], value[..., 0] * 6)


@pytest.mark.parametrize(("divisor", "multiplier"), [(3.0, 1 / 3), (0.0, 0.0), (5.0, 0.2), (float("inf"), 0.0)])
def test_a_dead_experts_input_divisor_is_a_missing_scale_and_no_infinite_one(tmp_path, divisor, multiplier):
    tensors = {
        "weight_packed": torch.zeros(2, 8, dtype=torch.uint8),
        "weight_scale": torch.ones(2, 1).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([float("inf")]),  # what an all-zero matrix got from some exports
        "input_global_scale": torch.tensor([divisor]),
    }
    q = read_one(tmp_path / "c", tensors, NVFP4)
    assert q.input_scale is not None
    assert q.input_scale.item() == pytest.approx(multiplier)
    assert torch.equal(q.dequantize(), torch.zeros(2, 16))


def test_e8m0_scales_are_exponents(tmp_path):
    """Byte 0 is 2**-127 and byte 118 is 2**-9, for FP4, FP6 and FP8 codes alike.

    The FP6 bytes are compressed-tensors 0.20.1's `pack_fp6_to_uint8` of 0.125, -7.5, 1.0, 3.75.
    """
    byte = torch.tensor([[118], [0]], dtype=torch.uint8)
    fp4 = {"weight_packed": torch.full((2, 16), 0x22, dtype=torch.uint8), "weight_scale": byte}
    q = read_one(tmp_path / "fp4", fp4, MXFP4)
    assert q.format == "mxfp4"
    assert q.dequantize()[:, 0].tolist() == [2.0**-9, 2.0**-127]
    fp6 = {"weight_packed": torch.tensor([193, 143, 92], dtype=torch.uint8).repeat(2, 8), "weight_scale": byte}
    q = read_one(tmp_path / "fp6", fp6, group(num_bits=6, type="float", strategy="group", group_size=32))
    assert q.format == "mxfp6_e2m3"
    assert torch.equal(q.dequantize()[0, :4] * 2**9, torch.tensor([0.125, -7.5, 1.0, 3.75]))
    fp8 = {"weight": torch.ones(2, 32).to(torch.float8_e4m3fn), "weight_scale": byte}
    q = read_one(tmp_path / "fp8", fp8, group(**FP8, strategy="group", group_size=32, scale_dtype="torch.uint8"))
    assert q.format == "mxfp8_e4m3"
    assert q.dequantize()[:, 0].tolist() == [2.0**-9, 2.0**-127]


@pytest.mark.parametrize(
    ("strategy", "scale", "format"),
    [
        ({"strategy": "tensor"}, torch.tensor([0.5]), "fp8_tensor"),
        ({"strategy": "tensor"}, torch.tensor(0.5), "fp8_tensor"),
        ({"strategy": "channel"}, torch.rand(576, 1), "fp8_channel"),
        ({"strategy": "channel"}, torch.rand(576), "fp8_channel"),
        ({"strategy": "block", "block_structure": [128, 128]}, torch.rand(5, 3), "fp8_block"),
        ({"strategy": "block", "block_structure": "128x128"}, torch.rand(5, 3).bfloat16(), "fp8_block"),
        ({"strategy": "group", "group_size": 43}, torch.rand(576, 6), "fp8_block"),
    ],
)
def test_fp8_strategies_and_their_partial_blocks(tmp_path, strategy, scale, format):
    """576 x 258 has a partial last block in both directions: row 575 takes scale row 4, column 257 scale column 2."""
    w = torch.linspace(-4, 4, 576 * 258).reshape(576, 258).to(torch.float8_e4m3fn)
    q = read_one(tmp_path / "c", {"weight": w, "weight_scale": scale}, group(**FP8, **strategy))
    assert q.format == format
    grid = scale.float().reshape(-1, 1) if scale.dim() < 2 else scale.float()
    rows, columns = {1: 576, 5: 128, 576: 1}[grid.shape[0]], {1: 258, 3: 128, 6: 43}[grid.shape[1]]
    spread = grid.repeat_interleave(rows, 0)[:576].repeat_interleave(columns, 1)[:, :258]
    assert torch.equal(q.dequantize(), w.float() * spread)


@pytest.mark.parametrize("n_scales", [(1,), (4, 1), (4, 2)])
def test_int8_with_and_without_zero_points(tmp_path, n_scales):
    w = torch.arange(-64, 64, dtype=torch.int8).reshape(4, 32)
    scale, z = torch.rand(n_scales), torch.randint(-9, 9, n_scales).to(torch.int8)
    size = {(4, 2): {"strategy": "group", "group_size": 16}, (4, 1): {"strategy": "channel"}}.get(n_scales, {})
    q = read_one(
        tmp_path / "c",
        {"weight": w, "weight_scale": scale, "weight_zero_point": z},
        group(num_bits=8, type="int", symmetric=False, **size),
    )
    spread = 16 if n_scales == (4, 2) else 32
    grid, zeros = (t.reshape(-1, n_scales[-1]).float().repeat_interleave(spread, 1) for t in (scale, z))
    assert torch.equal(q.dequantize(), (w.float() - zeros) * grid)


# ---- Refused ---------------------------------------------------------------------------------------------------------

F8 = torch.float8_e4m3fn
FAULTS = {
    "a low-bit weight without scales": ({"weight": torch.ones(4, 32).to(F8)}, "weight_scale is in no shard"),
    "packed codes without scales": ({"weight_packed": PACKED}, "weight_scale is in no shard"),
    "scales without their weight": ({"weight_scale": torch.ones(4, 1)}, "belongs to no quantized weight"),
    "a divisor beside a plain weight": (
        {"weight": torch.ones(4, 32), "weight_global_scale": torch.ones(1)},
        "belongs to no quantized weight",
    ),
    "calibrated, not compressed": (
        {"weight": torch.ones(4, 32).bfloat16(), "weight_scale": torch.ones(4, 1)},
        "calibrated, but not compressed",
    ),
    "packed and plain at once": (
        {"weight_packed": PACKED, "weight_scale": BYTES, "weight": torch.ones(4, 32)},
        "both stored",
    ),
    "nvfp4 without its divisor": (
        {"weight_packed": PACKED, "weight_scale": torch.ones(4, 2).to(F8)},
        "lacks a weight_global_scale",
    ),
    "mxfp4 with a divisor": (
        {"weight_packed": PACKED, "weight_scale": BYTES, "weight_global_scale": torch.ones(1)},
        "has a weight_global_scale",
    ),
    "two divisors": (
        {"weight_packed": PACKED, "weight_scale": torch.ones(4, 2).to(F8), "weight_global_scale": torch.ones(2)},
        "expected one F32 value",
    ),
    "half of the scales": ({"weight_packed": PACKED, "weight_scale": BYTES[:2]}, "no format has such scales"),
    "e4m3 scales a block of 32": (
        {"weight_packed": PACKED, "weight_scale": torch.ones(4, 1).to(F8), "weight_global_scale": torch.ones(1)},
        "no format has such scales",
    ),
    "surplus block columns": (
        {"weight": torch.ones(128, 258).to(F8), "weight_scale": torch.ones(1, 4)},
        "no format has such scales",
    ),
    "a stack of experts": (
        {"weight_packed": torch.zeros(2, 4, 16, dtype=torch.uint8), "weight_scale": torch.ones(2, 4, 2).to(F8)},
        "expected a matrix",
    ),
    "a weight_shape of other rows": (
        {
            "weight_packed": torch.zeros(4, 4, dtype=torch.int32),
            "weight_scale": torch.ones(4, 1),
            "weight_shape": torch.tensor([5, 32]),
        },
        "no format has such scales",
    ),
    "zero points of another shape": (
        {
            "weight_packed": torch.zeros(8, 4, dtype=torch.int32),
            "weight_scale": torch.ones(8, 1),
            "weight_zero_point": torch.zeros(8, 1, dtype=torch.int32),
        },
        r"has I32 \[1, 1\]",
    ),
    "zero points of float codes": (
        {
            "weight": torch.ones(4, 32).to(F8),
            "weight_scale": torch.ones(4, 1),
            "weight_zero_point": torch.zeros(4, 1, dtype=torch.int8),
        },
        "has no zero points",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_decoded_is_refused_by_name(tmp_path, fault):
    tensors, message = FAULTS[fault]
    with pytest.raises(CheckpointError, match=message) as caught:
        read_one(tmp_path / "c", tensors, group(**FP8, strategy="block", block_structure=[128, 128]))
    assert M in caught.value.message
    assert caught.value.fix


def test_the_tensors_decide_over_the_config_and_the_conflict_is_told(tmp_path):
    tensors = {"weight_packed": torch.zeros(4, 8, dtype=torch.int32), "weight_scale": torch.ones(4, 2)}
    q = read_one(tmp_path / "c", tensors, group(**INT4, group_size=128))
    assert q.block == (1, 32)
    with open_checkpoint(tmp_path / "c") as checkpoint:
        (problem,) = checkpoint.problems
    assert (problem.check, problem.severity) == ("config-conflict", "warning")
    assert "128 columns" in problem.message
    assert "32 columns" in problem.message


def test_blocks_that_the_config_does_not_size_are_not_guessed(tmp_path):
    """5 x 2 scales of 576 x 256 fit blocks of 116 to 143 rows."""
    tensors = {"weight": torch.ones(576, 256).to(F8), "weight_scale": torch.ones(5, 2)}
    with pytest.raises(CheckpointError, match="no format has such scales"):
        read_one(tmp_path / "c", tensors, group(**FP8, strategy="channel"))
