"""Writing compressed-tensors: what the tool's own readers make of it, and what comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import write_checkpoint
from workbench.kernels.elements import ELEMENTS, packed_columns

from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.convert import quantize_checkpoint
from workbench.checkpoints.dialects import Written, get_dialect
from workbench.errors import CheckpointError
from workbench.formats import QuantizedTensor, get_format

CT = get_dialect("compressed_tensors")
M = "model.layers.0.mlp.up_proj"
N, K = 192, 256
BLOCKS = {"fp8_block": (64, 128), "int4_group": (1, 64), "mxfp8_e4m3": (1, 32)}
KINDS = ["nvfp4", "mxfp4", "mxfp8_e4m3", "fp8_tensor", "fp8_channel", "fp8_block", "int4_group", "int8_channel"]


def make(format: str, *, half_scales: bool = True, n: int = N, k: int = K, **parts: object) -> QuantizedTensor:
    """A tensor of random codes; its float scales are bf16 values, as the tool writes them, or float32 ones."""
    spec, generator = get_format(format), torch.Generator().manual_seed(n * k)
    element = ELEMENTS[spec.element]
    raw = torch.randint(0, 256, (n, packed_columns(spec.element, k)), generator=generator, dtype=torch.uint8)
    if element.dtype == torch.float8_e4m3fn:
        raw = torch.where(raw & 0x7F == 0x7F, raw ^ 1, raw)  # no NaN
    block = BLOCKS.get(format)
    shape = spec.scale_shape((n, k), block)
    scales = torch.rand(shape, generator=generator) * 0.01 + 1e-4
    if spec.scale == "float":
        scales = scales.bfloat16().float() if half_scales else scales
    elif spec.scale == "e4m3":
        scales = (scales * 4e4).to(torch.float8_e4m3fn)
    else:
        scales = torch.randint(100, 130, shape, generator=generator, dtype=torch.uint8)
    parts = {"global_scale": torch.tensor(3.7e-4) if spec.has_global else None, **parts}
    return QuantizedTensor(
        format=format, codes=raw.view(element.dtype), block_scales=scales, shape=(n, k), block=block, **parts
    )


def write(path: Path, tensors: dict[str, QuantizedTensor | torch.Tensor], written: Written, **config: object) -> Path:
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stored |= CT.disassemble(name, tensor) if isinstance(tensor, QuantizedTensor) else {name: tensor}
    files = CT.config_files(config, written)
    return write_checkpoint(path, stored, shards=1, **files["config.json"])


def written_of(*formats: str, **more: object) -> Written:
    modules = {f"model.layers.{i}.mlp.up_proj": f for i, f in enumerate(formats)}
    return Written(formats=modules, blocks=BLOCKS, excludes=("lm_head",), **more)


def same_parts(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    def equal(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
        if x is None or y is None:
            return x is y
        return x.dtype == y.dtype and torch.equal(x.flatten().view(torch.uint8), y.flatten().view(torch.uint8))

    names = ("codes", "block_scales", "global_scale", "zero_points", "group_index", "input_scale")
    return (a.format, a.shape, a.block) == (b.format, b.shape, b.block) and all(
        equal(getattr(a, name), getattr(b, name)) for name in names
    )


# ---- The tool reads what we write ------------------------------------------------------------------------------------


def tool_scheme(written: Written, module: str):
    """The tool's own reading of our config block: the scheme that a linear layer of that name gets."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import is_match, match_targets

    config = QuantizationConfig.model_validate(CT.config_files({}, written)["config.json"]["quantization_config"])
    schemes = {target: s for s in config.config_groups.values() for target in s.targets}
    layer = torch.nn.Linear(2, 2)
    assert not is_match(module, layer, config.ignore)
    return schemes[match_targets(module, layer, schemes)[0]]


@pytest.mark.parametrize("half_scales", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_tool_dequantizes_ours_bit_for_bit(tmp_path, kind, half_scales):
    """Its decompressor returns its scales' dtype (bf16 for FP4): ours, rounded once, are the same bits. With float32
    scales, and for FP4 through its `dequantize` in float32, the bits are equal before any rounding."""
    written = written_of(kind)
    path = write(tmp_path / "c", {f"{M}.weight": make(kind, half_scales=half_scales)}, written)
    scheme = tool_scheme(written, M)
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    parts = {k.removeprefix(M + "."): v for k, v in load_file(path / "model.safetensors").items()}
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    assert set(compressor.compression_param_names(scheme)) - {"input_global_scale"} == set(parts) | (
        {"weight_global_scale"} if kind == "mxfp4" else set()  # 0.17 names one for MXFP4 and stores none
    )
    value = compressor.decompress(parts, scheme)["weight"]
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.problems == ()
        ours = checkpoint.read_dense(f"{M}.weight")
    assert torch.equal(value, ours.to(value.dtype))
    if kind in ("nvfp4", "mxfp4"):
        scale = parts["weight_scale"]
        exact = dequantize(
            x_q=unpack_fp4_from_uint8(parts["weight_packed"], N, K, dtype=torch.float32),
            scale=scale.float() if kind == "nvfp4" else 2.0 ** (scale.float() - 127),
            global_scale=parts.get("weight_global_scale"),
            dtype=torch.float32,
        )
        assert torch.equal(exact, ours)
    elif not half_scales and kind != "mxfp8_e4m3":
        assert value.dtype == torch.float32


@pytest.mark.parametrize(("n", "k"), [(12, 64), (13, 72), (8, 36)])
def test_the_tool_unpacks_our_words_and_zero_points(n, k):
    """Rows and columns that fill no word: padded as the tool pads them."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    block = (1, k // 4)
    q = make("int4_group", n=n, k=k)
    zeros = torch.randint(-8, 8, (n, 4), dtype=torch.int32)
    q = QuantizedTensor(
        format="int4_group", codes=q.codes, block_scales=torch.ones(n, 4), global_scale=None, shape=(n, k), block=block
    )
    plain = q.dequantize().to(torch.int8)
    asymmetric = QuantizedTensor(
        format="int4_group",
        codes=q.codes,
        block_scales=torch.ones(n, 4),
        global_scale=None,
        shape=(n, k),
        block=block,
        zero_points=zeros,
    )
    parts = CT.disassemble("m.weight", asymmetric)
    assert torch.equal(parts["m.weight_packed"], pack_to_int32(plain, 4))
    assert torch.equal(parts["m.weight_zero_point"], pack_to_int32(zeros.to(torch.int8), 4, packed_dim=0))
    assert torch.equal(unpack_from_int32(parts["m.weight_packed"], 4, torch.Size([n, k])), plain)
    assert parts["m.weight_shape"].tolist() == [n, k]


def test_a_mixed_checkpoint_gives_the_tool_each_modules_scheme():
    """The commonest format takes the class, the others their names; experts that agree share one regex."""
    experts = {f"model.layers.{i}.mlp.experts.{e}.{p}": "nvfp4" for i in (1, 2) for e in range(4) for p in ("w1", "w2")}
    experts |= {f"model.layers.1.mlp.experts.{e}.w2": "mxfp4" for e in range(4)}
    experts["model.layers.2.mlp.experts.3.w2"] = "fp8_channel"  # apart from its peers
    dense = {f"model.layers.{i}.self_attn.{p}": "fp8_channel" for i in range(3) for p in ("q_proj", "k_proj", "v_proj")}
    written = Written(
        formats={**dense, **experts},
        excludes=("lm_head", "model.embed_tokens", "model.layers.1.mlp.gate", "model.layers.3.mlp.experts"),
        static_activations=True,
    )
    packing = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized", "fp8_channel": "float-quantized"}
    block = CT.config_files({}, written)["config.json"]["quantization_config"]
    assert block["format"] == "mixed-precision"
    assert [g["targets"][0] for g in block["config_groups"].values()].count("Linear") == 1
    assert sum(len(g["targets"]) for g in block["config_groups"].values()) == 12  # of 26 modules
    for module, format in written.formats.items():
        assert tool_scheme(written, module).format == packing[format], module
    from workbench.checkpoints.dialects.compressed_tensors.groups import Plan, read_plan
    from workbench.checkpoints.files import Folder

    config = {"quantization_config": block}
    plan = read_plan(Folder(path=Path("c"), tensors={}, config=config, files=(), headers={}))
    assert isinstance(plan, Plan)
    assert all(plan.scheme_of(module).format == format for module, format in written.formats.items())
    assert plan.is_ignored("model.layers.3.mlp.experts.7.w1")
    assert plan.is_ignored("model.layers.1.mlp.gate")
    assert not plan.is_ignored("model.layers.1.mlp.gate_proj")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("static", [False, True])
def test_the_tool_takes_our_activations_as_meant(kind, static):
    """Static scales where they are stored, dynamic ones else; NVFP4 without input scales and int4 are weight-only."""
    scheme = tool_scheme(written_of(kind, static_activations=static), M)
    weight_only = kind == "int4_group" or (kind == "nvfp4" and not static)
    assert (scheme.input_activations is None) == weight_only
    if not weight_only:
        is_static = static and kind == "fp8_tensor"
        assert scheme.input_activations.dynamic == ("local" if kind == "nvfp4" else not is_static)
        assert scheme.input_activations.num_bits == scheme.weights.num_bits
    assert tool_scheme(written_of(kind, static_activations=static, weight_only=True), M).input_activations is None


# ---- Round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half_scales", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_writing_what_was_read_gives_the_same_bytes(tmp_path, kind, half_scales):
    extras: dict[str, list[dict]] = {
        "nvfp4": [{"input_scale": torch.tensor(0.0123)}],
        "fp8_tensor": [{"input_scale": torch.tensor(0.0123)}],
        "int4_group": [{"zero_points": (torch.arange(N * 4, dtype=torch.int32) % 16 - 8).reshape(N, 4)}],
        "int8_channel": [{"zero_points": (torch.arange(N, dtype=torch.int32) - 99).reshape(N, 1)}],
    }
    for number, extra in enumerate([{}, *extras.get(kind, [])]):
        tensor = make(kind, half_scales=half_scales, **extra)
        written = written_of(kind, static_activations="input_scale" in extra)
        first = write(tmp_path / f"{number}-1", {f"{M}.weight": tensor}, written)
        with open_checkpoint(first) as checkpoint:
            read = checkpoint.read(f"{M}.weight")
        second = write(tmp_path / f"{number}-2", {f"{M}.weight": read}, written)
        assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
        with open_checkpoint(second) as checkpoint:
            assert same_parts(checkpoint.read(f"{M}.weight"), read)
        if kind != "nvfp4":  # whose float32 multiplier may have no float32 reciprocal
            assert same_parts(read, tensor)


def test_the_nearest_divisor_moves_a_foreign_multiplier_by_at_most_one_unit(tmp_path):
    """1 / g is rounded once: relative error of a value at most 2**-23, and the same bf16."""
    for number in range(20):
        q = make("nvfp4", global_scale=torch.rand((), generator=torch.Generator().manual_seed(number)) * 1e-3)
        path = write(tmp_path / str(number), {f"{M}.weight": q}, written_of("nvfp4"))
        with open_checkpoint(path) as checkpoint:
            back = checkpoint.read_dense(f"{M}.weight")
        assert torch.allclose(back, q.dequantize(), rtol=2.0**-22, atol=0)
        assert torch.equal(back.bfloat16(), q.dequantize(torch.bfloat16))


@pytest.mark.parametrize("name", ["fp8_block", "mixed", "mxfp4", "nvfp4", "nvfp4a16", "w4a16", "w4a16g32asym", "w8a8"])
def test_the_tools_exports_are_written_again_byte_for_byte(shared_data, name):
    (folder,) = (shared_data / "oracles").glob(f"llmcompressor--{name}--*")
    stored = load_file(folder / "model.safetensors")
    ours: dict[str, torch.Tensor] = {}
    with open_checkpoint(folder) as checkpoint:
        for entry in checkpoint.entries():
            tensor = checkpoint.read(entry.name)
            ours |= CT.disassemble(entry.name, tensor) if entry.quantized else {entry.name: tensor}
    assert ours.keys() == stored.keys()
    for key, value in stored.items():
        assert (ours[key].dtype, ours[key].shape) == (value.dtype, value.shape), key
        assert torch.equal(ours[key].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), key


@pytest.mark.parametrize("name", ["fp8_block", "mxfp4", "nvfp4", "nvfp4a16", "w4a16", "w8a8", "mixed"])
def test_the_written_config_is_the_tools(shared_data, name):
    (folder,) = (shared_data / "oracles").glob(f"llmcompressor--{name}--*")
    theirs = json.loads((folder / "config.json").read_text())["quantization_config"]
    with open_checkpoint(folder) as checkpoint:
        entries = [e for e in checkpoint.entries() if len(e.shape) == 2]
        written = Written(
            formats={e.module: e.format for e in entries if e.quantized},
            excludes=tuple(e.module for e in entries if not e.quantized),
            static_activations=any("input_global_scale" in name for name in checkpoint.folder.tensors),
            weight_only=name == "nvfp4a16",
            blocks={"fp8_block": (128, 128), "int4_group": (1, 128)},
        )
    ours = CT.config_files({}, written)["config.json"]["quantization_config"]
    assert set(ours.pop("ignore")) == set(theirs.pop("ignore"))
    groups = [list(block.pop("config_groups").values()) for block in (ours, theirs)]
    for group in (*groups[0], *groups[1]):
        targets = group.pop("targets")
        assert name == "mixed" or targets == ["Linear"]  # two regexes there, a class and names here
    assert sorted(groups[0], key=str) == sorted(groups[1], key=str)
    assert ours == theirs


@pytest.mark.parametrize(
    ("source", "oracle", "format", "rule", "block"),
    [
        ("qwen3moe", "nvfp4a16--qwen3moe", "nvfp4", "llm_compressor", None),
        ("llama", "mxfp4--llama", "mxfp4", "llm_compressor", None),
        ("llama", "w4a16g32asym--llama", "int4_group", "llm_compressor_asym", (1, 32)),
        ("llama", "w8a8--llama", "int8_channel", "llm_compressor", None),
        ("llama", "fp8_block--llama", "fp8_block", "llm_compressor", (128, 128)),
    ],
)
def test_a_conversion_under_the_tools_rule_is_the_tools_export(
    shared_data, tmp_path, source, oracle, format, rule, block
):
    """Every stored byte of every tensor, and the whole config block."""
    folder = shared_data / "oracles"
    theirs = folder / f"llmcompressor--{oracle}"
    quantize_checkpoint(
        folder / f"source--{source}",
        tmp_path / "q",
        format=format,
        dialect="compressed_tensors",
        rule=rule,
        block=block,
    )
    ours, expected = (load_file(path / "model.safetensors") for path in (tmp_path / "q", theirs))
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        assert (ours[key].dtype, ours[key].shape) == (value.dtype, value.shape), key
        assert torch.equal(ours[key].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), key
    configs = [
        json.loads((path / "config.json").read_text())["quantization_config"] for path in (tmp_path / "q", theirs)
    ]
    assert configs[0] == configs[1]


# ---- Refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "mxfp6_e3m2"}, "mxfp6_e3m2, which"),
        ({"pre_quant_scale": torch.ones(K)}, "pre_quant_scale"),
        ({"input_scale": torch.zeros(())}, "no positive finite float32 divisor"),
        ({"global_scale": torch.tensor(float("inf"))}, "no positive finite float32 divisor"),
        ({"global_scale": torch.tensor(1e-45)}, "no positive finite float32 divisor"),
        ({"global_scale": torch.ones(N, K // 16)}, "several global scales"),
        ({"format": "mxfp4", "input_scale": torch.ones(())}, "static input scale"),
        ({"format": "int4_group", "group_index": torch.zeros(K, dtype=torch.int32)}, "act-order"),
        ({"format": "int8_channel", "zero_points": torch.full((N, 1), 128, dtype=torch.int32)}, "zero points outside"),
        ({"format": "int4_group", "zero_points": torch.full((N, 4), 8, dtype=torch.int32)}, "zero points outside"),
    ],
)
def test_what_the_dialect_has_no_place_for_is_refused(change, message):
    q = make(change.pop("format", "nvfp4"), **change)
    with pytest.raises(CheckpointError, match=message) as caught:
        CT.disassemble(f"{M}.weight", q)
    assert M in caught.value.message
    assert caught.value.fix


def test_rows_that_share_scales_are_refused():
    q = make("mxfp8_e4m3")
    shared = QuantizedTensor(
        format="mxfp8_e4m3",
        codes=q.codes,
        block_scales=q.block_scales[::2].contiguous(),
        global_scale=None,
        shape=q.shape,
        block=(2, 32),
    )
    with pytest.raises(CheckpointError, match="rows share scales"):
        CT.disassemble(f"{M}.weight", shared)


# ---- Whole models ----------------------------------------------------------------------------------------------------


def write_llama(path: Path, formats: dict[str, str], **config: object) -> Path:
    """A tiny seeded Llama; a projection named in `formats` holds random codes of that format, about 0.05 large."""
    transformers = pytest.importorskip("transformers")
    llama = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=128,
        hidden_size=K,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        dtype="bfloat16",
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    weights = transformers.LlamaForCausalLM(llama).bfloat16().state_dict()
    tensors: dict[str, QuantizedTensor | torch.Tensor] = {}
    quantized = {}
    for name, w in weights.items():
        module = name.removesuffix(".weight")
        format = formats.get(module.rpartition(".")[2])
        tensors[name] = w.contiguous() if format is None else make_small(format, *w.shape)
        if format is not None:
            quantized[module] = format
    written = Written(formats=quantized, blocks=BLOCKS, excludes=("lm_head",), **config)
    return write(path, tensors, written, **json.loads(llama.to_json_string()))


def make_small(format: str, n: int, k: int) -> QuantizedTensor:
    q = make(format, n=n, k=k)
    if q.spec.scale != "float":
        return q
    shrink = 0.05 / q.dequantize().abs().mean()
    return replace(q, block_scales=(q.block_scales * shrink).bfloat16().float())


def test_transformers_loads_a_mixed_model_with_our_values(tmp_path):
    """Through compressed-tensors' ModelCompressor: every weight after its decompression is ours."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    attention = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "fp8_channel")
    formats = {**attention, "gate_proj": "int4_group", "up_proj": "int4_group", "down_proj": "int8_channel"}
    path = write_llama(tmp_path / "c", {**formats, "o_proj": "fp8_block"})
    config = CompressedTensorsConfig(run_compressed=False)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, quantization_config=config)
    model(torch.tensor([[1, 2, 3]]))  # decompresses
    found = model.state_dict()
    with open_checkpoint(path) as checkpoint:
        quantized = [e for e in checkpoint.entries() if e.quantized]
        assert len(quantized) == 14
        for entry in quantized:
            assert torch.equal(found[entry.name], checkpoint.read_dense(entry.name, torch.bfloat16)), entry.name


SERVE = """
import sys, torch
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=128,
          max_num_seqs=4, kv_cache_memory_bytes=32 << 20)
sampling = SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
(output,) = llm.generate([{"prompt_token_ids": list(range(1, 40))}], sampling, use_tqdm=False)
pairs = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[1:]
torch.save(torch.tensor([entry[token].logprob for token, entry in pairs]), sys.argv[2])
"""


@pytest.mark.vllm
@pytest.mark.slow
def test_stock_vllm_serves_our_int4_as_its_decoded_weights(tmp_path):
    from transformers import AutoModelForCausalLM

    formats = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), "int4_group")
    path = write_llama(tmp_path / "c", formats)
    quiet = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-c", SERVE, str(path), str(tmp_path / "served.pt")]
    done = subprocess.run(command, env=os.environ | quiet, capture_output=True, text=True, timeout=300)
    if "object has no attribute 'cpu_gemm_wna16'" in done.stderr:
        pytest.skip("vLLM's build for this CPU has no product of INT4 weights (cpu_gemm_wna16)")
    assert done.returncode == 0, done.stderr[-2000:]
    served = torch.load(tmp_path / "served.pt", weights_only=True)
    with open_checkpoint(path) as checkpoint:
        decoded = {e.name: checkpoint.read_dense(e.name, torch.bfloat16) for e in checkpoint.entries()}
    plain = write_checkpoint(tmp_path / "plain", decoded, shards=1)
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    ids = torch.arange(1, 40)
    with torch.no_grad():
        expected = model(ids[None]).logits[0].float().log_softmax(-1)[:-1].gather(-1, ids[1:, None]).squeeze(-1)
    assert expected.std() > 0.2
    assert torch.allclose(served, expected, atol=0.02)
