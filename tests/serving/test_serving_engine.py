"""The real engine, in process, on tiny models: what the plugin computes, holds in memory and reports."""

from __future__ import annotations

import pytest
import torch
from oracle import prompt_logprobs
from tiny_models import EXCLUDED
from workbench.kernels import reference

from workbench.checkpoints import open_checkpoint
from workbench.formats import quantize
from workbench.formats.activations import read_activations

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("model", ["deepseek", "qwen"])
def test_weight_only_emulation_equals_the_dequantized_model_bit_for_bit(engine, model):
    # bfloat16: packed weights against the same model stored decoded and run by vLLM's own unquantized layers.
    packed, dense = engine.jobs[f"{model}_weight_only"], engine.jobs[f"{model}_dense"]
    assert torch.equal(packed["prompt"], dense["prompt"])
    assert packed["generated"] == dense["generated"]


def test_reference_backend_equals_the_dequantized_checkpoint(engine):
    assert torch.equal(engine.jobs["deepseek_reference"]["prompt"], engine.jobs["deepseek_dense"]["prompt"])


def test_stock_vllm_serves_what_the_modelopt_writer_wrote_and_emulation_equals_it(engine):
    # vLLM's own reader, method and plain emulation of NVFP4, activations in four bits: every bit the same.
    stock, ours = engine.jobs["small_stock"], engine.jobs["small_ours"]
    for layer in ("model.layers.0.self_attn.qkv_proj", "model.layers.1.mlp.down_proj"):
        assert stock["before"]["methods"][layer] == "ModelOptLinearMethod"
        assert ours["before"]["methods"][layer] == "PackedLinearMethod"
    assert torch.equal(stock["prompt"], ours["prompt"])
    assert stock["generated"] == ours["generated"]


def test_compat_vllm_equals_stock_where_fused_matrices_have_scales_of_their_own(engine):
    stock, ours = engine.jobs["apart_stock"], engine.jobs["apart_as_vllm"]
    held = ours["before"]["packed"]["model.layers.0.self_attn.qkv_proj"]["parameters"]
    with open_checkpoint(engine.folder / "small_apart") as checkpoint:
        parts = [checkpoint.read(f"model.layers.0.self_attn.{p}_proj.weight") for p in "qkv"]
    for name, scales in (
        ("weight_scale_2", [p.global_scale for p in parts]),
        ("input_scale", [p.input_scale for p in parts]),
    ):
        assert len({float(s) for s in scales}) > 1
        assert held[name].view(torch.float32).tolist() == [float(max(scales))]
    assert torch.equal(stock["prompt"], ours["prompt"])
    assert stock["generated"] == ours["generated"]
    assert engine.audit("apart_as_vllm")["layers"]["model.layers.0.self_attn.qkv_proj"]["compat"] == "vllm"


def test_requantization_at_load_equals_the_converted_checkpoint(engine):
    at_load, converted = engine.jobs["deepseek_requant"], engine.jobs["deepseek_mxfp4"]
    loaded = at_load["before"]["packed"]
    assert loaded
    assert loaded.keys() == converted["before"]["packed"].keys()
    with open_checkpoint(engine.folder / "deepseek_nvfp4") as checkpoint:
        stored = checkpoint.read("model.layers.2.mlp.experts.5.down_proj.weight").dequantize(torch.float32)
    expected = quantize(stored, "mxfp4")
    experts = loaded["model.layers.2.mlp.experts.routed_experts"]["parameters"]
    assert torch.equal(experts["w2_weight"][5], expected.codes)
    assert torch.equal(experts["w2_weight_scale"][5], expected.block_scales)
    for name, module in loaded.items():
        for parameter, data in module["parameters"].items():
            assert torch.equal(data, converted["before"]["packed"][name]["parameters"][parameter]), (name, parameter)


def test_direct_quantization_at_load_stores_quantize_of_the_source(engine):
    with open_checkpoint(engine.folder / "qwen") as checkpoint:
        parts = [quantize(checkpoint.read(f"model.layers.0.self_attn.{p}_proj.weight").float(), "mxfp4") for p in "qkv"]
    held = engine.jobs["qwen_direct"]["before"]["packed"]["model.layers.0.self_attn.qkv_proj"]["parameters"]
    assert torch.equal(held["weight"], torch.cat([p.codes for p in parts]))
    assert torch.equal(held["weight_scale"], torch.cat([p.block_scales for p in parts]))


def test_dynamic_weights_and_activations_match_transformers_in_float32(engine):
    # Band: the two sides sum in another order (1e-6), which may move a value over an FP4 rounding boundary; measured
    # 2e-7 in the mean where the rounding itself moves the log-probabilities by 0.11.
    def visit(module, x):
        return x if module.endswith((".gate", "kv_b_proj")) else reference.nvfp4_qdq_activation(x)

    oracle = prompt_logprobs(engine.folder / "deepseek_f32", engine.prompts, visit)
    difference = (engine.jobs["deepseek_exact"]["prompt"] - oracle).abs()
    plain = prompt_logprobs(engine.folder / "deepseek_f32", engine.prompts, lambda module, x: x)
    effect = (plain - oracle).abs().mean()
    assert difference.median() < 1e-5
    assert difference.mean() < 0.01 * effect


@pytest.mark.parametrize("split", ["tp", "ep"])
def test_two_ranks_compute_what_one_does(engine, split):
    # Band: sums in another order. A token's own NVFP4 scale is that of the whole token, also where its columns are
    # split: a rank that took its own half's would move log-probabilities by 0.1.
    one, two = engine.jobs["deepseek_exact"], engine.jobs[f"deepseek_two_{split}"]
    assert (two["prompt"] - one["prompt"]).abs().max() < 1e-4
    assert [token for token, _ in two["generated"]] == [token for token, _ in one["generated"]]


@pytest.mark.parametrize("split", ["tp", "ep"])
def test_two_ranks_hold_the_bytes_of_one(engine, split):
    whole = engine.jobs["deepseek_exact"]["before"]["packed"]
    ranks = [rank["packed"] for rank in engine.jobs[f"deepseek_two_{split}"]["ranks"]]
    assert len(ranks) == 2
    seen = set()
    for name, module in whole.items():
        for parameter, data in module["parameters"].items():
            parts = [rank[name]["parameters"][parameter] for rank in ranks]
            kind = _how_split(name, parameter, experts_apart=split == "ep")
            seen.add(kind)
            assert torch.equal(_joined(parts, kind), data), (name, parameter, kind)
    assert seen == {"same", "rows", "halves", "columns"} | ({"experts"} if split == "ep" else set())


def _how_split(module: str, parameter: str, *, experts_apart: bool) -> str:
    """How the engine shares a packed parameter out over the ranks."""
    if "routed_experts" in module:
        if experts_apart:
            return "experts"
        if parameter.endswith("scale_2"):
            return "same"
        return "halves" if parameter.startswith("w13") else "columns"
    if module.endswith("fused_qkv_a_proj") or parameter.endswith("scale_2"):
        return "same"
    if module.endswith("gate_up_proj"):
        return "halves"
    return "columns" if module.endswith(("o_proj", "down_proj")) else "rows"


def _joined(parts: list[torch.Tensor], kind: str) -> torch.Tensor:
    if kind == "same":
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    if kind == "halves":  # of gate and up each
        return torch.cat(
            [torch.cat(half, dim=-2) for half in zip(*(p.chunk(2, dim=-2) for p in parts), strict=True)], -2
        )
    return torch.cat(parts, dim={"experts": 0, "rows": -2, "columns": -1}[kind])


def test_static_weights_and_activations_match_transformers_in_float32(engine):
    with open_checkpoint(engine.folder / "qwen_static") as checkpoint:
        scales = {e.module: checkpoint.read(e.name).input_scale for e in checkpoint.entries() if e.has_input_scale}
        weights = {e.name: checkpoint.read_dense(e.name) for e in checkpoint.entries()}
    assert any(".experts." in module for module in scales)
    _write_f32(engine, weights)

    def visit(module, x):
        return reference.nvfp4_qdq_activation(x, scales[module]) if module in scales else x

    oracle = prompt_logprobs(engine.folder / "qwen_static_f32", engine.prompts, visit)
    difference = (engine.jobs["qwen_exact"]["prompt"] - oracle).abs()
    dynamic = prompt_logprobs(
        engine.folder / "qwen_static_f32",
        engine.prompts,
        lambda module, x: reference.nvfp4_qdq_activation(x) if module in scales else x,
    )
    effect = (dynamic - oracle).abs().mean()  # static and dynamic scales must be told apart
    assert difference.median() < 1e-5
    assert difference.mean() < 0.01 * effect


def test_no_dense_copy_of_a_packed_weight_exists_between_calls(engine):
    job = engine.jobs["deepseek_weight_only"]
    audit = engine.audit("deepseek_weight_only")["layers"]
    with open_checkpoint(engine.folder / "deepseek_nvfp4") as checkpoint:
        logical = {
            e.module: e.shape for e in checkpoint.entries() if e.quantized and not e.module.endswith("kv_b_proj")
        }
        stored = sum(checkpoint.read(f"{m}.weight").nbytes for m in logical)
    for moment in ("before", "after"):
        packed = job[moment]["packed"]
        held = sum(p.numel() for module in packed.values() for p in module["parameters"].values())
        assert held == stored  # codes, block scales and global scales, and not a byte more
        assert not any(module["float_buffers"] for module in packed.values())
    shapes = set(logical.values()) | {(8, 128, 128), (8, 128, 64)}  # matrices, and the experts' w13 and w2 stacks
    shapes |= {(64 + 576, 128), (2 * 256, 128), (2 * 64, 128)}  # fused q_a/kv_a and gate/up
    routers = {(8, 128)}
    assert shapes.isdisjoint(set(job["after"]["dense_shapes"]) - routers)
    assert sum(layer["weight_bytes"] for layer in audit.values() if layer["weight"] == "nvfp4") == stored


def test_excluded_modules_run_unquantized(engine):
    audit = engine.audit("deepseek_requant")["layers"]
    excluded = [name for name in audit if name.startswith(EXCLUDED)]
    assert excluded
    for name in excluded:
        assert audit[name]["weight"] == "bf16"
        assert audit[name]["activation"] == "none"
    assert not any(name.startswith(EXCLUDED) for name in engine.jobs["deepseek_requant"]["before"]["packed"])
    assert audit["model.layers.2.mlp.shared_experts.down_proj"]["weight"] == "mxfp4"


def test_the_audit_tells_static_from_dynamic(engine):
    static = engine.audit("qwen_exact")["layers"]
    assert static["model.layers.0.mlp.experts.routed_experts"]["activation_scale"] == "static"
    dynamic = engine.audit("deepseek_exact")["layers"]
    assert dynamic["model.layers.1.mlp.experts.routed_experts"]["activation_scale"] == "dynamic_per_token"
    assert dynamic["model.layers.1.self_attn.kv_b_proj"]["weight"] == "nvfp4 decoded to f32 at load"
    assert dynamic["model.layers.1.self_attn.kv_b_proj"]["activation_scale"] == "none"
    blocks = engine.audit("deepseek_requant")["layers"]
    assert blocks["model.layers.1.self_attn.o_proj"]["activation_scale"] == "dynamic_per_block"
    none = engine.audit("deepseek_weight_only")["layers"]
    assert none["model.layers.1.self_attn.o_proj"] == {
        "weight": "nvfp4",
        "activation": "none",
        "activation_scale": "none",
        "weight_bytes": 128 * 256 // 2 + 128 * 256 // 16 + 4,
    }


def test_the_audit_tells_what_conversion_cost(engine):
    requant, kept = engine.audit("deepseek_requant"), engine.audit("qwen_weight_only")
    load = requant["load"]
    layers = load["converted"]
    assert list(layers) == [f"model.layers.{i}" for i in range(3)]
    # 3 matrices of an MLP (8 experts and a shared one), attention's 5, and kv_b_proj once more: converted, then decoded
    assert [c["conversions"] for c in layers.values()] == [3 + 5 + 1, 24 + 5 + 1 + 3, 24 + 3 + 5 + 1]
    assert sum(c["seconds"] for c in layers.values()) == pytest.approx(load["convert_s"], abs=1e-3)
    assert 0 < load["read_s"] + load["convert_s"] <= requant["weights_s"] <= requant["load_s"]
    # one tensor at a time: its NVFP4, its float32 and its MXFP4 bytes, of kv_b_proj [4 * 128, 512] (decoded for MLA)
    assert load["convert_peak_bytes"] == max(c["peak_bytes"] for c in layers.values())
    weights = 512 * 512
    assert weights * (4 + 9 / 16 + 17 / 32) <= load["convert_peak_bytes"] < weights * (4 + 9 / 16 + 17 / 32) + 100
    assert load["device_peak_bytes"] is None
    assert kept["load"]["converted"] == {}


def test_captured_inputs_equal_a_transformers_hook(engine):
    seen: dict[str, list[torch.Tensor]] = {}

    def note(module, x):
        seen.setdefault(module, []).append(x.reshape(-1, x.shape[-1]))
        return x

    prompt_logprobs(engine.folder / "deepseek", engine.prompts, note)
    captured = read_activations(engine.folder / "captured")
    seen = {module: torch.cat(rows) for module, rows in seen.items() if not module.endswith(".gate")}
    assert set(captured.modules()) >= set(seen)
    for module in captured.modules():
        expected = seen.get(module)
        if expected is None:  # an expert that no token reached
            assert captured.tokens_seen(module) == 0
            continue
        assert captured.tokens_seen(module) == expected.shape[0], module
        rows = captured.input(module)
        if ".experts." in module:  # the two sides walk an expert's tokens in another order
            rows, expected = (t[t[:, 0].argsort()] for t in (rows, expected))
        assert torch.allclose(rows, expected, atol=1e-4, rtol=1e-4), (module, (rows - expected).abs().max())
        assert captured.amax(module) == pytest.approx(float(expected.abs().amax()), rel=1e-4)
        # The sample holds every row here, so it says what the moment of all rows is.
        moment, x = captured.second_moment(module), rows.double()
        assert moment is not None
        want = x.T @ x / len(x)
        assert (moment.double() - want).abs().max() <= 1e-7 * want.abs().max(), module


def _write_f32(engine, weights):
    from safetensors.torch import save_file
    from transformers import AutoConfig

    target = engine.folder / "qwen_static_f32"
    if not target.exists():
        target.mkdir()
        AutoConfig.from_pretrained(engine.folder / "qwen").save_pretrained(target)
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
