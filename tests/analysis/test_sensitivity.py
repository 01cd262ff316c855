"""From weights to answers, on a tiny DeepSeek-V3: figures against plain transformers, oddities named, resumption."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from workbench.mini_models import model_path
from workbench.mini_models.model import build_model, export

from workbench.analysis import sensitivity as measuring
from workbench.analysis.plan import KEEP, plan_bits
from workbench.analysis.sensitivity import measure_recipes, measure_sensitivity, read_sensitivity
from workbench.analysis.through import Rounding, load_network
from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.convert import quantize_checkpoint
from workbench.cli import main
from workbench.errors import CheckpointError, ConfigError
from workbench.formats import get_format, quantize

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
WINDOWS = torch.randint(16, 2000, (9, 12), generator=torch.Generator().manual_seed(3)).tolist()


def written(folder: Path, **overrides: Any) -> Path:
    torch.manual_seed(5)
    export(build_model("mini_kimi", **(TINY | overrides)), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path() / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def measured(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sensitivity")
    measure_sensitivity(source=tiny, windows=WINDOWS, out=out, formats=("mxfp4", "nvfp4"), subsets=3)
    return out


def log_probabilities(path: Path, kept: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
    """Of plain transformers; kept: takes the outputs of every layer, attention and MLP by name."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for name, module in model.named_modules():
        if kept is not None and re.fullmatch(r"model\.layers\.\d+(\.mlp|\.self_attn)?", name):

            def keep(_: Any, __: Any, output: Any, name: str = name) -> None:
                kept[name] = (output[0] if isinstance(output, tuple) else output).double()

            module.register_forward_hook(keep)
    with torch.no_grad():
        return model(torch.tensor(WINDOWS)).logits.double().log_softmax(-1)


def rewritten(source: Path, target: Path, rounded: dict[str, torch.Tensor]) -> Path:
    """The checkpoint with some tensors replaced, in float32."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    for shard in target.glob("*.safetensors"):
        held = load_file(shard)
        save_file({name: rounded.get(name, t.float()) for name, t in held.items()}, shard, metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(
    "unit", ["model.layers.1.mlp.experts", "model.layers.0.self_attn.[q_a_proj+kv_a_proj_with_mqa]"]
)
def test_a_units_divergence_is_plain_transformers_with_those_matrices_rounded(
    tiny: Path, measured: Path, tmp_path: Path, unit: str
) -> None:
    frame, record = read_sensitivity(measured)
    assert record.vocabulary == 2048
    row = frame[(frame["kind"] == "unit") & (frame["format"] == "mxfp4") & (frame["unit"] == unit)].iloc[0]
    with open_checkpoint(tiny) as checkpoint:
        names = [f"{module}.weight" for module in row["modules"]]
        assert len(names) == (12 if unit.endswith("experts") else 2)
        rounded = {name: quantize(checkpoint.read_dense(name), "mxfp4").dequantize() for name in names}
    exact: dict[str, torch.Tensor] = {}
    changed: dict[str, torch.Tensor] = {}
    p = log_probabilities(tiny, exact)
    q = log_probabilities(rewritten(tiny, tmp_path / "rounded", rounded), changed)
    kl = (p.exp() * (p - q)).sum(-1).mean(-1)
    np.testing.assert_allclose(row["kl_windows"], kl.numpy(), rtol=2e-3, atol=1e-8)
    assert row["kl"] == pytest.approx(float(kl.mean()), rel=1e-3)
    assert row["kl_low"] <= row["kl"] <= row["kl_high"]
    assert row["same_top1"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    block = ".".join(unit.split(".")[:4])
    places = {"block": block, "residual": block.rpartition(".")[0], "last": "model.layers.2"}
    for column, place in places.items():
        noise = float((changed[place] - exact[place]).square().sum() / exact[place].square().sum())
        assert row[f"noise_{column}"] == pytest.approx(noise, rel=1e-3)


def test_layers_that_are_skipped_change_nothing(tiny: Path) -> None:
    network = load_network(tiny)
    baseline = network.baseline(WINDOWS)
    module = "model.layers.2.mlp.shared_experts.down_proj"
    with network.rounded({module: Rounding("mxfp4")}):
        whole, short = (network.outcome(baseline, first_layer=layer) for layer in (0, 2))
    np.testing.assert_array_equal(whole.kl, short.kl)
    assert short.kl.max() > 0
    assert network.outcome(baseline, first_layer=0).kl.max() == 0  # and the weights are back


def test_rounded_activations_are_the_oracles(tiny: Path, tmp_path: Path) -> None:
    oracle = importlib.util.spec_from_file_location("oracle", Path(__file__).parents[1] / "serving" / "oracle.py")
    assert oracle is not None
    assert oracle.loader is not None
    plain = importlib.util.module_from_spec(oracle)
    oracle.loader.exec_module(plain)
    spec = get_format("nvfp4")
    assert spec.qdq_activation is not None
    network = load_network(tiny)
    with network.rounded({m: Rounding("nvfp4", activations=True) for m in network.modules}), torch.no_grad():
        logs = network.model(torch.tensor(WINDOWS), use_cache=False).logits.double().log_softmax(-1)
    following = torch.tensor(WINDOWS)[:, 1:, None]
    quantize_checkpoint(tiny, tmp_path / "q", format="nvfp4", dialect="compressed_tensors", weight_only=True)
    quantize_checkpoint(tmp_path / "q", tmp_path / "f32", format="f32", dialect="plain")

    def visit(name: str, x: torch.Tensor) -> torch.Tensor:
        rounded = spec.qdq_activation(x.flatten(0, -2), spec.rule(None), None).view(x.shape)
        return rounded if name in network.modules else x

    expected = plain.prompt_logprobs(tmp_path / "f32", WINDOWS, visit)
    torch.testing.assert_close(logs[:, :-1].gather(2, following).flatten(), expected, rtol=0, atol=1e-3)


def test_a_recipe_diverges_as_the_checkpoint_that_quantize_writes(tiny: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mixed.yaml"
    recipe.write_text(
        'rules:\n  - {match: "*self_attn*", format: nvfp4}\n  - {match: "*experts*", format: mxfp4}\n'
        '  - {match: "*", format: keep}\n'
    )
    recipes = {"mixed": str(recipe), "nvfp4": "nvfp4"}
    found = measure_recipes(source=tiny, windows=WINDOWS, out=tmp_path / "out", recipes=recipes)
    from workbench.checkpoints.recipe import read_recipe

    quantize_checkpoint(
        tiny, tmp_path / "q", dialect="compressed_tensors", recipe=read_recipe(str(recipe)), weight_only=True
    )
    quantize_checkpoint(tmp_path / "q", tmp_path / "f32", format="f32", dialect="plain")
    p, q = log_probabilities(tiny), log_probabilities(tmp_path / "f32")
    row = pd.read_parquet(tmp_path / "out" / "sensitivity.parquet").iloc[0]
    assert row["kl"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    with open_checkpoint(tmp_path / "q") as checkpoint:
        stored = sum(checkpoint.read(e.name).codes.nbytes for e in checkpoint.entries() if e.quantized)
    assert row["bits"] > 8 * stored
    difference = found.differences[0]
    assert (difference.first, difference.second) == ("mixed", "nvfp4")
    assert difference.low <= difference.mean <= difference.high
    assert difference.second_bits == pytest.approx(4.5)


def test_the_sum_of_units_is_held_against_what_was_measured(measured: Path) -> None:
    frame, record = read_sensitivity(measured)
    assert {a.case for a in record.additivity} == {"all mxfp4", "all nvfp4", *(f"subset {i}" for i in range(3))}
    units = frame[frame["kind"] == "unit"]
    for row in frame[frame["kind"] != "unit"].itertuples():
        chosen = json.loads(row.choice)
        parts = units.set_index(["unit", "format"])["kl"]
        assert row.kl_predicted == pytest.approx(sum(parts[unit, f] for unit, f in chosen.items()))
        assert 0.3 < row.kl / row.kl_predicted < 3  # of random weights; docs/analysis.md has a trained model's
    of = units[units["format"] == "mxfp4"]
    rates = (of["kl"] / of["weights"]).set_axis(of["unit"])
    assert list(record.ranking["mxfp4"]) == list(rates.sort_values(ascending=False).index)


def test_a_plan_by_measured_divergence_takes_the_measured_figures(tiny: Path, measured: Path, tmp_path: Path) -> None:
    frame, _ = read_sensitivity(measured)
    plan = plan_bits(source=tiny, bits=5.0, sensitivity=measured)
    assert plan.bits <= 5
    assert plan.measure == "KL divergence, nats"
    kl = frame[frame["kind"] == "unit"].set_index(["unit", "format"])["kl"]
    for choice in plan.choices:
        assert choice.noise == (0 if choice.format == KEEP else kl[choice.unit, choice.format])
    assert plan.uniform["nvfp4"]["noise"] == pytest.approx(float(kl.xs("nvfp4", level="format").sum()))
    assert plan.noise < plan.uniform[plan.best_uniform]["noise"]
    other = written(tmp_path / "other", **{"n_shared_experts": 2})
    with pytest.raises(ConfigError, match="was measured on"):
        plan_bits(source=other, bits=5.0, sensitivity=measured)
    with pytest.raises(ConfigError, match="mxfp8_e4m3"):
        plan_bits(source=tiny, bits=5.0, sensitivity=measured, formats=("nvfp4", "mxfp8_e4m3"))
    with pytest.raises(ConfigError, match="other matrices"):
        plan_bits(source=tiny, bits=5.0, sensitivity=measured, exclude=("*experts.0.*",))
    with pytest.raises(ConfigError, match="no sensitivity measurement"):
        plan_bits(source=tiny, bits=5.0, sensitivity=tmp_path)


def test_a_killed_pass_goes_on_to_the_same_table(
    tiny: Path, measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, done = measuring._measure, []

    def dying(*arguments: Any) -> dict[str, Any]:
        if len(done) == 10:
            raise KeyboardInterrupt
        done.append(arguments)
        return real(*arguments)

    settings: dict[str, Any] = {"source": tiny, "windows": WINDOWS, "out": tmp_path, "formats": ("mxfp4", "nvfp4")}
    monkeypatch.setattr(measuring, "_measure", dying)
    with pytest.raises(KeyboardInterrupt):
        measure_sensitivity(**settings, subsets=3)
    again = []
    monkeypatch.setattr(measuring, "_measure", lambda *a: again.append(a) or real(*a))
    measure_sensitivity(**settings, subsets=3)
    frame, _ = read_sensitivity(tmp_path)
    assert len(again) == len(frame) - 10
    pd.testing.assert_frame_equal(frame, read_sensitivity(measured)[0])
    measure_sensitivity(**settings, subsets=3)  # finished: nothing is run again
    assert len(again) == len(frame) - 10
    with pytest.raises(ConfigError, match="another measurement"):
        measure_sensitivity(**settings, subsets=2)


def test_what_a_format_cannot_take_is_named_and_left_alone(tmp_path: Path) -> None:
    odd = written(tmp_path / "odd", **{"moe_intermediate_size": 48})  # three blocks of 16, one and a half of 32
    found = measure_sensitivity(
        source=odd, windows=WINDOWS[:2], out=tmp_path / "out", formats=("mxfp4", "nvfp4"), subsets=0
    )
    assert {f.kind for f in found.faults} == {"format"}
    assert all("down_proj" in f.tensor and "mxfp4" in f.message for f in found.faults)
    frame, _ = read_sensitivity(tmp_path / "out")
    units = frame[frame["kind"] == "unit"]
    experts = units[units["unit"] == "model.layers.1.mlp.experts"]
    assert set(experts["format"]) == {"nvfp4"}
    assert np.isnan(units["kl_low"]).all()  # two windows are too few for an interval
    plan = plan_bits(source=odd, bits=16.0, sensitivity=tmp_path / "out", formats=("mxfp4",))
    kept = {c.unit for c in plan.choices if c.format == KEEP}
    assert "model.layers.1.mlp.experts" in kept
    assert len(plan.faults) == len(found.faults)


def test_models_that_cannot_be_run_are_refused_before_they_are_read(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    with monkeypatch.context() as patch:
        patch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1_000_000))
        with pytest.raises(CheckpointError, match="GB of memory"):
            load_network(tiny, tokens=100)
    unknown = tmp_path / "unknown"
    shutil.copytree(tiny, unknown)
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps(config | {"model_type": "no_such_model"}))
    with pytest.raises(CheckpointError, match="no_such_model"):
        load_network(unknown)
    with pytest.raises(ConfigError, match="equal length"):
        measure_recipes(source=tiny, windows=[[1, 2], [1]], out=tmp_path / "o", recipes={"nvfp4": "nvfp4"})


def test_the_command_measures_units_and_recipes(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Anna has 12 apples and gives 5 to Ben. How many are left? 12 - 5 = 7. " * 20)
    common = [str(tiny), "--text", str(text), "--tokens", "16", "--windows", "8"]
    units = ["--format", "nvfp4", "--subsets", "1", "--select", "*layers.1.mlp.shared*"]
    assert main(["sensitivity", *common, *units, "--out", str(tmp_path / "units")]) == 0
    shown = capsys.readouterr().out
    assert "2048 tokens of the vocabulary" in shown
    assert "all nvfp4" in shown
    recipes = ["--recipe", "nvfp4", "--recipe", "mxfp4", "--skip", "8", "--windows", "8"]
    assert main(["sensitivity", *common, *recipes, "--out", str(tmp_path / "recipes")]) == 0
    assert "nvfp4 (4.500 bits) - mxfp4 (4.250 bits)" in capsys.readouterr().out
    assert main(["sensitivity", *common, "--recipe", "nvfp4", "--format", "mxfp4", "--out", str(tmp_path / "x")]) == 3
