"""The shipped checkpoint: names, shapes, dtypes, size and config, read from the files alone."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from workbench.mini_models import model_path

FOLDER = model_path("mini_kimi")
LAYERS, EXPERTS = 5, 16


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return json.loads((FOLDER / "config.json").read_text())


@pytest.fixture(scope="module")
def headers() -> dict[str, dict[str, Any]]:
    """Tensor name -> safetensors header entry, with the shard it is in."""
    found = {}
    for path in sorted(FOLDER.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        found |= {name: {**entry, "shard": path.name} for name, entry in header.items() if name != "__metadata__"}
    return found


def test_unknown_model_is_refused() -> None:
    with pytest.raises(ValueError, match="no shipped model 'mini_gpt'"):
        model_path("mini_gpt")


def test_size_on_disk() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 24_000_000
    assert len(list(FOLDER.glob("*.safetensors"))) > 1


def test_every_file_of_a_hub_checkpoint_is_there() -> None:
    names = {path.name for path in FOLDER.iterdir()}
    assert names >= {
        *("README.md", "config.json", "generation_config.json", "model.safetensors.index.json"),
        *("tokenizer.json", "tokenizer_config.json"),
    }


def test_index_matches_the_shards(headers) -> None:
    index = json.loads((FOLDER / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: entry["shard"] for name, entry in sorted(headers.items())}
    sizes = [entry["data_offsets"][1] - entry["data_offsets"][0] for entry in headers.values()]
    assert index["metadata"]["total_size"] == sum(sizes)


def test_experts_are_stored_one_by_one(headers) -> None:
    shapes = {"gate": [128, 256], "up": [128, 256], "down": [256, 128]}
    for layer in range(1, LAYERS):
        prefix = f"model.layers.{layer}.mlp"
        for expert in range(EXPERTS):
            for part, shape in shapes.items():
                assert headers[f"{prefix}.experts.{expert}.{part}_proj.weight"]["shape"] == shape
        for part, shape in shapes.items():
            assert headers[f"{prefix}.shared_experts.{part}_proj.weight"]["shape"] == shape
        assert headers[f"{prefix}.gate.e_score_correction_bias"]["shape"] == [EXPERTS]
        assert headers[f"{prefix}.gate.weight"]["shape"] == [EXPERTS, 256]
    assert headers["model.layers.0.mlp.gate_proj.weight"]["shape"] == [512, 256]
    assert not [name for name in headers if "gate_up" in name]
    assert sum(".experts." in name for name in headers) == 3 * EXPERTS * (LAYERS - 1)


def test_dtypes(headers) -> None:
    for name, entry in headers.items():
        assert entry["dtype"] == ("F32" if name.endswith("e_score_correction_bias") else "BF16"), name


def test_input_dimensions_divide_into_blocks_of_32_on_two_devices(headers) -> None:
    for name, entry in headers.items():
        if len(entry["shape"]) == 2:
            assert entry["shape"][1] % 64 == 0, name


def test_config(config) -> None:
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


def test_weights_are_finite_and_every_expert_was_used(headers) -> None:
    torch = pytest.importorskip("torch")
    safe_open = pytest.importorskip("safetensors").safe_open
    norms: dict[str, list[float]] = {}
    for path in sorted(FOLDER.glob("*.safetensors")):
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
    shares = json.loads((FOLDER / "training.json").read_text())["expert_token_share_min_max"]
    assert 0.03 < shares[0] <= shares[1] < 0.12


def test_tokenizer_reads_digits_one_by_one_and_renders_a_chat() -> None:
    auto = pytest.importorskip("transformers").AutoTokenizer
    tokenizer = auto.from_pretrained(FOLDER)
    assert len(tokenizer) == 2048
    assert tokenizer.tokenize("12345") == list("12345")
    assert tokenizer.decode(tokenizer("Zoë paid $3.50, naïvely.\n").input_ids) == "Zoë paid $3.50, naïvely.\n"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|>"
    assert tokenizer.tokenize(chat)[0] == "<|im_user|>"


def test_stop_tokens_are_the_tokenizers() -> None:
    tokens = {t["content"]: t["id"] for t in json.loads((FOLDER / "tokenizer.json").read_text())["added_tokens"]}
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [tokens["[EOS]"], tokens["<|im_end|>"]]


@pytest.mark.slow
def test_transformers_solves_a_problem() -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from workbench.mini_models import measure

    model = transformers.AutoModelForCausalLM.from_pretrained(Path(FOLDER), dtype=torch.float32)  # quick on any CPU
    tokenizer = transformers.AutoTokenizer.from_pretrained(Path(FOLDER))
    result = measure.greedy_accuracy(model, tokenizer.backend_tokenizer, "mmlu_pro", 8)
    assert result["custom_extract"] >= 0.5
