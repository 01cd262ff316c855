"""Every (dialect, format) pair of the tables: round trips, the same values in every dialect, decoding, refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import tiny_tensors, write_checkpoint

from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.convert import quantize_checkpoint
from workbench.checkpoints.dialects import DIALECTS
from workbench.errors import CheckpointError, FormatError
from workbench.formats import FORMATS, QuantizedTensor, mxfp4_to_nvfp4, quantize

PAIRS = [(d.name, f) for d in DIALECTS.values() for f in d.writes]
QUANTIZED = [(d, f) for d, f in PAIRS if f in FORMATS]
SHARED = [f for f in FORMATS if sum(f == written for _, written in QUANTIZED) > 1]
BLOCKS = {"int4_group": (1, 32), "int8_group": (1, 32)}  # the tiny checkpoint's K is 32 for down_proj
# Dialects that store NVFP4's global scale as a divisor: float32 holds no divisor that decodes to the same bits as every
# multiplier, so a block's step may differ in its last bit.
DIVISORS = {"compressed_tensors"}
WEIGHT = "model.layers.1.mlp.experts.2.down_proj.weight"


def convert(source: Path, target: Path, dialect: str, format: str, **options: object) -> Path:
    """gpt_oss writes the experts of its own model type only; everything else takes any module."""
    if dialect == "gpt_oss" and format in FORMATS:
        options["exclude"] = ["*self_attn*", "*shared_experts*", "model.layers.0.*"]
    if format in BLOCKS:
        options["block"] = BLOCKS[format]
    quantize_checkpoint(source, target, format=format, dialect=dialect, **options)
    return target


@pytest.fixture(scope="module")
def gpt_oss_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("gpt") / "tiny", tiny_tensors(), model_type="gpt_oss")


@pytest.fixture(scope="module")
def made(plain: Path, gpt_oss_source: Path, tmp_path_factory: pytest.TempPathFactory):
    """made(dialect, format): the tiny checkpoint in that form, converted once."""
    done: dict[tuple[str, str], Path] = {}

    def make(dialect: str, format: str) -> Path:
        if (dialect, format) not in done:
            source = gpt_oss_source if dialect == "gpt_oss" else plain
            target = tmp_path_factory.mktemp("made") / f"{dialect}-{format}"
            done[dialect, format] = convert(source, target, dialect, format)
        return done[dialect, format]

    return make


# ---- round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dialect", "format"), PAIRS)
def test_write_read_write_is_byte_identical(made, tmp_path, dialect, format):
    """The card is another's: it tells what it was made from."""
    first = made(dialect, format)
    second = convert(first, tmp_path / "q", dialect, format)
    names = sorted(p.name for p in first.iterdir() if p.suffix != ".md")
    assert sorted(p.name for p in second.iterdir() if p.suffix != ".md") == names
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


@pytest.mark.parametrize(("dialect", "format"), QUANTIZED)
def test_what_is_read_back_is_what_was_quantized(made, dialect, format):
    tensors = tiny_tensors()
    with open_checkpoint(made(dialect, format)) as checkpoint:
        assert checkpoint.dialect == dialect
        assert not checkpoint.declaration.conflicts
        found = [e for e in checkpoint.entries() if e.quantized]
        assert {e.format for e in found} == {format}
        assert {e.name for e in found} >= {n for n in tensors if ".mlp.experts." in n}
        for entry in found:
            assert checkpoint.declaration.format_of(entry.module) == format
        q = checkpoint.read(WEIGHT)
        assert isinstance(q, QuantizedTensor)
        expected = quantize(tensors[WEIGHT], format, block=BLOCKS.get(format)).dequantize()
        tolerance = 2.0**-22 if format == "nvfp4" and dialect in DIVISORS else 0.0
        assert bool(((q.dequantize() - expected).abs() <= tolerance * expected.abs()).all())


@pytest.mark.parametrize("format", SHARED)
def test_the_same_weights_decode_alike_in_every_dialect_that_writes_the_format(made, format):
    dialects = [d for d, f in QUANTIZED if f == format]
    opened = {d: open_checkpoint(made(d, format)) for d in dialects}
    for name in tiny_tensors():
        values = {d: c.read_dense(name) for d, c in opened.items() if c.entry(name).format == format}
        for dialect, value in values.items():
            first = next(iter(values.values()))
            if format == "nvfp4" and dialect in DIVISORS:
                assert bool(((value - first).abs() <= 2.0**-22 * first.abs()).all()), (dialect, name)
            else:
                assert torch.equal(value, first), (dialect, name)
    for checkpoint in opened.values():
        checkpoint.close()


@pytest.mark.parametrize(("dialect", "format"), QUANTIZED)
def test_any_quantized_source_is_decoded_and_requantized(made, tmp_path, dialect, format):
    source = made(dialect, format)
    quantize_checkpoint(source, tmp_path / "f32", format="f32", dialect="plain")
    target = ("quark", "mxfp4") if format != "mxfp4" else ("modelopt", "nvfp4")
    quantize_checkpoint(source, tmp_path / "q", format=target[1], dialect=target[0], rule=FORMATS[target[1]].rules[1])
    with (
        open_checkpoint(source) as packed,
        open_checkpoint(tmp_path / "f32") as dense,
        open_checkpoint(tmp_path / "q") as again,
    ):
        for entry in packed.entries():
            assert torch.equal(dense.read_dense(entry.name), packed.read_dense(entry.name)), entry.name
        expected = quantize(packed.read_dense(WEIGHT), target[1], FORMATS[target[1]].rules[1])
        assert torch.equal(again.read_dense(WEIGHT), expected.dequantize())


# ---- MXFP4 to NVFP4 --------------------------------------------------------------------------------------------------


def test_mxfp4_to_nvfp4_is_exact_also_where_fused_projections_share_a_global(quark, tmp_path):
    result = quantize_checkpoint(quark, tmp_path / "q", format="nvfp4", dialect="modelopt")
    stored = load_file(tmp_path / "q" / "model.safetensors")
    expert = WEIGHT.removesuffix("down_proj.weight")
    assert stored[expert + "gate_proj.weight_scale_2"] == stored[expert + "up_proj.weight_scale_2"]
    with open_checkpoint(quark) as first, open_checkpoint(tmp_path / "q") as second:
        for entry in first.entries():
            assert torch.equal(first.read_dense(entry.name), second.read_dense(entry.name)), entry.name
    assert all(o.changed == 0 and o.error == 0 for o in result.outcomes)
    assert any("without rounding" in w for w in result.warnings)
    assert "| all | 45 | exact |" in (tmp_path / "q" / "README.md").read_text()


def test_mxfp4_to_nvfp4_says_where_it_is_not_exact(plain, broken, tmp_path):
    tensors = tiny_tensors()
    tensors[WEIGHT][0] *= 2.0**-30  # scales that lie 2**30 apart
    source = write_checkpoint(tmp_path / "wide", tensors)
    quantize_checkpoint(source, tmp_path / "mx", format="mxfp4", dialect="quark")
    result = quantize_checkpoint(tmp_path / "mx", tmp_path / "nv", format="nvfp4", dialect="modelopt")
    (lossy,) = [o for o in result.outcomes if o.changed]
    assert lossy.name == WEIGHT
    assert any(f"first: {WEIGHT}, {lossy.changed} values changed" in w for w in result.warnings)
    with open_checkpoint(tmp_path / "mx") as first, open_checkpoint(tmp_path / "nv") as second:
        q = first.read(WEIGHT)
        assert isinstance(q, QuantizedTensor)
        assert torch.equal(second.read_dense(WEIGHT), mxfp4_to_nvfp4(q)[0].dequantize())
        assert int((first.read_dense(WEIGHT) != second.read_dense(WEIGHT)).sum()) == lossy.changed


def test_mxfp4_to_nvfp4_by_another_rule_is_a_quantization(quark, tmp_path):
    quantize_checkpoint(quark, tmp_path / "q", format="nvfp4", dialect="modelopt", rule="mse", shared_globals=False)
    with open_checkpoint(quark) as first, open_checkpoint(tmp_path / "q") as second:
        expected = quantize(first.read_dense(WEIGHT), "nvfp4", "mse")
        assert torch.equal(second.read_dense(WEIGHT), expected.dequantize())


# ---- broken sources --------------------------------------------------------------------------------------------------


def set_byte(suffix: str, byte: int):
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[WEIGHT + suffix].view(torch.uint8).view(-1)[0] = byte

    return edit


@pytest.mark.parametrize(("fixture", "byte", "block"), [("modelopt", 0x7F, 16), ("quark", 255, 32)])
@pytest.mark.parametrize("format", ["f32", "bf16"])
def test_nan_is_decoded_as_nan_with_a_warning(request, broken, tmp_path, fixture, byte, block, format):
    source = broken(request.getfixturevalue(fixture), set_byte("_scale", byte))
    result = quantize_checkpoint(source, tmp_path / "d", format=format, dialect="plain")
    stored = load_file(tmp_path / "d" / "model.safetensors")
    assert int(stored[WEIGHT].isnan().sum()) == block
    assert not any(bool(t.isnan().any()) for n, t in stored.items() if n != WEIGHT)
    (warning,) = [w for w in result.warnings if "broken" in w]
    assert WEIGHT in warning
    assert "1 NaN or infinite values among its" in warning
    assert warning in (tmp_path / "d" / "README.md").read_text()


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_an_unusable_global_is_decoded_as_it_is_with_a_warning(modelopt, broken, tmp_path, value):
    source = broken(modelopt, lambda t: t.update({WEIGHT + "_scale_2": torch.tensor(value)}))
    result = quantize_checkpoint(source, tmp_path / "d", format="f32", dialect="plain")
    assert any(WEIGHT in w and "global scale" in w for w in result.warnings)
    with open_checkpoint(source) as packed:
        expected = packed.read_dense(WEIGHT)
    stored = load_file(tmp_path / "d" / "model.safetensors")[WEIGHT]
    assert torch.equal(stored.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize(
    "target",
    [("nvfp4", "modelopt"), ("mxfp4", "quark"), ("bf16", "plain")],
    ids=lambda target: target[0],
)
def test_negative_scales_are_refused_by_name(modelopt, broken, tmp_path, target):
    source = broken(modelopt, set_byte("_scale", 0xB8))  # -1.0
    with pytest.raises(CheckpointError, match=re.escape(WEIGHT) + r" in model.safetensors has 1 negative block scales"):
        quantize_checkpoint(source, tmp_path / "q", format=target[0], dialect=target[1])
    source = tmp_path / "broken"
    tensors = load_file(source / "model.safetensors")
    assert tensors[WEIGHT + "_scale"].float().min() < 0


@pytest.mark.parametrize("value", [float("nan"), 0.0, -1.0, float("inf")])
def test_an_unusable_input_scale_is_refused_unless_it_is_left_out(modelopt, broken, tmp_path, value):
    name = WEIGHT.removesuffix("weight") + "input_scale"
    source = broken(modelopt, lambda t: t.update({name: torch.tensor(value)}))
    with pytest.raises(CheckpointError, match=re.escape(WEIGHT) + ".*input scale"):
        quantize_checkpoint(source, tmp_path / "q", format="nvfp4", dialect="modelopt")
    quantize_checkpoint(source, tmp_path / "w", format="nvfp4", dialect="modelopt", weight_only=True)
    assert not any("input_scale" in n for n in load_file(tmp_path / "w" / "model.safetensors"))
    config = json.loads((tmp_path / "w" / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "W4A16_NVFP4"
    quantize_checkpoint(source, tmp_path / "mx", format="mxfp4", dialect="quark")  # it does not come along there


@pytest.mark.parametrize(("dialect", "format"), QUANTIZED)
def test_every_format_refuses_nan_weights_by_name(tmp_path, dialect, format):
    tensors = tiny_tensors()
    tensors[WEIGHT][3, 5] = float("nan")
    source = write_checkpoint(tmp_path / "nan", tensors, model_type="gpt_oss")
    with pytest.raises(FormatError, match=re.escape(WEIGHT)):
        convert(source, tmp_path / "q", dialect, format)
    assert [p.name for p in tmp_path.iterdir()] == ["nan"]
