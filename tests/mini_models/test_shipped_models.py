"""The shipped checkpoints: names, shapes, dtypes, size and config, read from the files alone."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from workbench.mini_models import MODELS, model_path

LAYERS, EXPERTS = 5, 16
QWEN_LAYERS = 6
MOST_BYTES = {"mini_kimi": 24_000_000, "mini_qwen": 12_000_000}
Headers = dict[str, dict[str, Any]]


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest) -> Path:
    return model_path(request.param)


@pytest.fixture(scope="module")
def headers(folder: Path) -> Headers:
    return headers_of(folder)


@pytest.fixture(scope="module")
def kimi() -> Headers:
    return headers_of(model_path("mini_kimi"))


def headers_of(folder: Path) -> Headers:
    """Tensor name -> safetensors header entry, with the shard it is in."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        found |= {name: {**entry, "shard": path.name} for name, entry in header.items() if name != "__metadata__"}
    return found


def test_unknown_model_is_refused() -> None:
    with pytest.raises(ValueError, match="no shipped model 'mini_gpt'"):
        model_path("mini_gpt")


def test_size_on_disk(folder: Path) -> None:
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MOST_BYTES[folder.name]
    assert len(list(folder.glob("*.safetensors"))) > 1


def test_every_file_of_a_hub_checkpoint_is_there(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        *("README.md", "config.json", "generation_config.json", "model.safetensors.index.json"),
        *("tokenizer.json", "tokenizer_config.json"),
    }


def test_index_matches_the_shards(folder: Path, headers: Headers) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: entry["shard"] for name, entry in sorted(headers.items())}
    sizes = [entry["data_offsets"][1] - entry["data_offsets"][0] for entry in headers.values()]
    assert index["metadata"]["total_size"] == sum(sizes)


def test_experts_are_stored_one_by_one(kimi: Headers) -> None:
    shapes = {"gate": [128, 256], "up": [128, 256], "down": [256, 128]}
    for layer in range(1, LAYERS):
        prefix = f"model.layers.{layer}.mlp"
        for expert in range(EXPERTS):
            for part, shape in shapes.items():
                assert kimi[f"{prefix}.experts.{expert}.{part}_proj.weight"]["shape"] == shape
        for part, shape in shapes.items():
            assert kimi[f"{prefix}.shared_experts.{part}_proj.weight"]["shape"] == shape
        assert kimi[f"{prefix}.gate.e_score_correction_bias"]["shape"] == [EXPERTS]
        assert kimi[f"{prefix}.gate.weight"]["shape"] == [EXPERTS, 256]
    assert kimi["model.layers.0.mlp.gate_proj.weight"]["shape"] == [512, 256]
    assert not [name for name in kimi if "gate_up" in name]
    assert sum(".experts." in name for name in kimi) == 3 * EXPERTS * (LAYERS - 1)


def test_a_dense_layer_has_seven_projections_and_the_head_is_the_embedding() -> None:
    found = headers_of(model_path("mini_qwen"))
    shapes = {
        "self_attn.q_proj": [256, 256], "self_attn.k_proj": [128, 256], "self_attn.v_proj": [128, 256],
        "self_attn.o_proj": [256, 256], "mlp.gate_proj": [768, 256], "mlp.up_proj": [768, 256],
        "mlp.down_proj": [256, 768],
    }  # fmt: skip
    for layer in range(QWEN_LAYERS):
        for name, shape in shapes.items():
            assert found[f"model.layers.{layer}.{name}.weight"]["shape"] == shape
    assert sum("_proj." in name for name in found) == len(shapes) * QWEN_LAYERS
    assert found["model.embed_tokens.weight"]["shape"] == [2048, 256]
    assert "lm_head.weight" not in found


def test_dtypes(headers: Headers) -> None:
    for name, entry in headers.items():
        assert entry["dtype"] == ("F32" if name.endswith("e_score_correction_bias") else "BF16"), name


def test_input_dimensions_divide_into_blocks_of_32_on_two_devices(headers: Headers) -> None:
    for name, entry in headers.items():
        if len(entry["shape"]) == 2:
            assert entry["shape"][1] % 64 == 0, name


def test_config() -> None:
    config, dense = (json.loads((model_path(name) / "config.json").read_text()) for name in ("mini_kimi", "mini_qwen"))
    expected = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "dtype": "bfloat16",
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_hidden_layers": LAYERS,
    }
    assert {key: config[key] for key in expected} == expected
    assert config["rope_parameters"]["rope_type"] == "yarn"
    expected = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "num_hidden_layers": QWEN_LAYERS,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
    assert {key: dense[key] for key in expected} == expected


def test_weights_are_finite_and_every_expert_was_used(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    safe_open = pytest.importorskip("safetensors").safe_open
    norms: dict[str, list[float]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                tensor = file.get_tensor(name).float()
                assert torch.isfinite(tensor).all(), name
                assert tensor.std() > 0, name
                if ".experts." in name:
                    layer, part = name.split(".")[2], name.split(".")[-2]
                    norms.setdefault(f"{layer}.{part}", []).append(tensor.norm().item())
    for of_one_kind in norms.values():  # an expert that gets no tokens only decays
        assert min(of_one_kind) > 0.5 * max(of_one_kind)
    assert bool(norms) == (folder.name == "mini_kimi")
    shares = json.loads((model_path() / "training.json").read_text())["expert_token_share_min_max"]
    assert 0.03 < shares[0] <= shares[1] < 0.12


def test_tokenizer_reads_digits_one_by_one_and_renders_a_chat(folder: Path) -> None:
    auto = pytest.importorskip("transformers").AutoTokenizer
    tokenizer = auto.from_pretrained(folder)
    assert len(tokenizer) == 2048
    assert tokenizer.tokenize("12345") == list("12345")
    assert tokenizer.decode(tokenizer("Zoë paid $3.50, naïvely.\n").input_ids) == "Zoë paid $3.50, naïvely.\n"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|>"
    assert tokenizer.tokenize(chat)[0] == "<|im_user|>"


def test_stop_tokens_are_the_tokenizers(folder: Path) -> None:
    tokens = {t["content"]: t["id"] for t in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]}
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [tokens["[EOS]"], tokens["<|im_end|>"]]


@pytest.mark.slow
def test_transformers_solves_a_problem(folder: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from workbench.mini_models import measure

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # quick on any CPU
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    result = measure.greedy_accuracy(model, tokenizer.backend_tokenizer, "mmlu_pro", 4)
    assert result["custom_extract"] >= 0.5
