"""The numerics card: what workers wrote down, against what an arm asks for; and vLLM's own path as a baseline arm."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from workbench import experiment, records, runfolder
from workbench.arm_evaluation import ArmEvaluation
from workbench.checkpoints.convert import quantize_checkpoint
from workbench.composition import compose, resolved_yaml
from workbench.errors import ConfigError, EngineError
from workbench.gating.numerics import check_numerics
from workbench.gating.policy import read_policy
from workbench.progress import Progress
from workbench.records import NumericsCard
from workbench.serving import command
from workbench.serving.endpoint import start
from workbench.serving.numerics import JOB, WORKER, read_card, table
from workbench.serving.spec import EngineSpec, ServeSpec
from workbench.settings import read_settings

MODULES = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Three layers, all linear weights NVFP4 with static input scales; its config says W4A4."""
    folder = tmp_path_factory.mktemp("card")
    generator = torch.Generator().manual_seed(0)
    names = [f"model.layers.{i}.{m}" for i in range(3) for m in MODULES]
    tensors = {f"{n}.weight": (torch.randn(64, 64, generator=generator) * 0.1).bfloat16() for n in names}
    (folder / "bf16").mkdir()
    save_file(tensors, folder / "bf16" / "model.safetensors")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    (folder / "bf16" / "config.json").write_text(json.dumps(config))
    quantize_checkpoint(
        folder / "bf16", folder / "nvfp4", format="nvfp4", dialect="modelopt", input_amax=dict.fromkeys(names, 3.0)
    )
    return folder / "nvfp4"


def entry(module: str, layer: int, **changes: Any) -> dict[str, Any]:
    """What a worker writes of a layer that runs NVFP4 with static input scales."""
    parts = ("gate_proj", "up_proj") if module.endswith("gate_up_proj") else (module.rpartition(".")[2],)
    parent = f"model.layers.{layer}.{module.rpartition('.')[0]}"
    facts = {
        "name": f"model.layers.{layer}.{module}",
        "kind": "linear",
        "method": "ModelOptLinearMethod",
        "kernel": "FlashInferCutlassNvFp4LinearKernel",
        "storage": "weight uint8",
        "modules": [f"{parent}.{part}" for part in parts],
        "sampled": [],
        "codes": "",
        "not_probed": "",
        "weights": "nvfp4",
        "match": "exact",
        "weight_error": 0.0,
        "activation": "nvfp4",
        "scale": "static",
        "residual": 0.002,
        "differing": "",
    }
    return facts | changes


def card_of(tmp_path: Path, checkpoint: Path, layers: list[dict[str, Any]], *, backend: str = "stock", **spec: Any):
    ranks = spec.pop("ranks", [layers])
    for rank, of in enumerate(ranks):
        facts = {"engine_version": "vllm 0.26.0", "rank": rank, "ranks": len(ranks), "device": "a card", "error": ""}
        path = tmp_path / ("x.facts.json" + (f".rank{rank}" if rank else ""))
        path.write_text(json.dumps({**facts, "seconds": 1.0 + rank, "layers": of}))
    return read_card(ServeSpec(arm="x", checkpoint=checkpoint, backend=backend, **spec), tmp_path / "x.facts.json")


def every_layer(**changes: Any) -> list[dict[str, Any]]:
    modules = ("self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    return [entry(module, layer, **changes) for layer in range(3) for module in modules]


def test_layers_that_run_alike_are_one_row(checkpoint, tmp_path):
    card = card_of(tmp_path, checkpoint, every_layer())
    assert card.verdict == "runs as asked: 9 layers"
    assert card.as_asked
    assert [(r.modules, r.layers, r.count) for r in card.rows] == [
        ("model.layers.*.self_attn.o_proj", "0-2", 3),
        ("model.layers.*.mlp.gate_up_proj", "0-2", 3),
        ("model.layers.*.mlp.down_proj", "0-2", 3),
    ]
    assert card.rows[0].asked == "nvfp4, activations nvfp4 (static)"


def test_a_checkpoint_whose_config_says_w4a4_and_that_runs_weight_only_is_named(checkpoint, tmp_path):
    # The checkpoint's config says four-bit activations of every layer; a card made from it would call this as asked.
    assert json.loads((checkpoint / "hf_quant_config.json").read_text())["quantization"]["quant_algo"] == "NVFP4"
    marlin = {"kernel": "MarlinNvFp4LinearKernel", "match": "rounded", "weight_error": 1e-3, "activation": "none"}
    card = card_of(tmp_path, checkpoint, every_layer(**marlin, scale=""))
    assert card.verdict.startswith(
        "9 of 9 layers do not run as asked: model.layers.*.self_attn.o_proj (layers 0-2): input asked in nvfp4, runs"
        " not rounded (weight-only) [ModelOptLinearMethod / MarlinNvFp4LinearKernel]"
    )
    assert len(card.findings) == 3
    assert "MarlinNvFp4LinearKernel" in table(card)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"match": "scaled by 1.3"}, "scaled by 1.3, as with another matrix's global scale"),
        ({"match": "differs", "weight_error": 0.09}, "none of the checkpoint's (0.09 relative error to nvfp4)"),
        ({"weights": "mxfp4 at load"}, "asked nvfp4 weights, runs mxfp4 at load"),
        ({"activation": "fp8", "scale": "per token"}, "input asked in nvfp4, runs rounded to fp8"),
        ({"scale": "per token"}, "asked static input scales, runs per token"),
        ({"activation": "unclear", "scale": ""}, "rounding is none of those known"),
        ({"differing": "none at 8 rows, nvfp4 static at 72"}, "not alike: none at 8 rows"),
    ],
)
def test_every_way_to_differ_is_a_finding_of_its_own(checkpoint, tmp_path, changes, said):
    layers = every_layer()
    layers[4] |= changes
    card = card_of(tmp_path, checkpoint, layers)
    assert card.verdict.startswith("1 of 9 layers do not run as asked")
    assert len(card.findings) == 1
    assert card.findings[0].startswith("model.layers.*.mlp.gate_up_proj (layers 1): ")
    assert said in card.findings[0]


def test_what_could_not_be_probed_is_counted_not_passed_over(checkpoint, tmp_path):
    layers = every_layer()
    layers[0] |= {"not_probed": "RuntimeError: no workspace", "weights": "", "match": "", "activation": ""}
    card = card_of(tmp_path, checkpoint, layers)
    assert card.verdict == "runs as asked: 8 layers; 1 could not be probed"
    assert (card.layers, card.probed) == (9, 8)


def test_a_rank_that_runs_something_else_is_seen(checkpoint, tmp_path):
    other = every_layer()
    other[2] |= {"activation": "none", "scale": "", "method": "UnquantizedLinearMethod"}
    card = card_of(tmp_path, checkpoint, [], ranks=[every_layer(), other])
    assert (card.ranks, card.layers, card.seconds) == (2, 9, 2.0)
    assert len(card.findings) == 1
    assert "model.layers.*.mlp.down_proj (layers 0)" in card.findings[0]
    assert "rank 1 differs" in card.findings[0]


def test_each_backend_asks_for_what_it_does(checkpoint, tmp_path):
    plain = card_of(tmp_path, checkpoint, every_layer(activation="none", scale=""), backend="reference")
    assert plain.as_asked
    assert not card_of(tmp_path, checkpoint, every_layer(), backend="reference").as_asked
    assert card_of(tmp_path, checkpoint, every_layer(), backend="emulation").as_asked
    weight_only = every_layer(activation="none", scale="")
    assert card_of(tmp_path, checkpoint, weight_only, backend="emulation", activations="none").as_asked
    converted = every_layer(weights="mxfp4 at load", activation="mxfp4", scale="rule even")
    assert card_of(tmp_path, checkpoint, converted, backend="requant", format="mxfp4").as_asked
    assert not card_of(tmp_path, checkpoint, every_layer(), backend="requant", format="mxfp4").as_asked


def test_a_worker_that_wrote_nothing_leaves_a_card_that_says_so(checkpoint, tmp_path):
    card = read_card(ServeSpec(arm="x", checkpoint=checkpoint), tmp_path / "none.json")
    assert not card.as_asked
    assert card.verdict.startswith("no card: the worker wrote no facts")


# ---- the gate --------------------------------------------------------------------------------------------------------


def test_the_gate_calls_a_gated_arm_invalid_that_ran_something_else(checkpoint, tmp_path):
    wrong = card_of(tmp_path, checkpoint, every_layer(activation="none", scale=""), backend="emulation")
    right = card_of(tmp_path, checkpoint, every_layer(), backend="emulation")
    policy = {"gated": ["a", "b"], "margin_pp": 10.0}
    cards = {"a": wrong, "b": right, "a_stock": wrong}
    checks = {c.arm: c for c in check_numerics(read_policy(policy), cards)}
    assert {arm: c.status for arm, c in checks.items()} == {"a": "invalid", "b": "pass", "a_stock": "reported"}
    assert checks["a"].value == 9.0
    assert "weight-only" in checks["a"].reason
    advisory = read_policy(policy | {"tiers": {"numerics": "advisory"}})
    assert check_numerics(advisory, {"a": wrong})[0].status == "reported"
    nothing = NumericsCard(arm="a", backend="emulation", engine_version="", device="", verdict="no card: x", error="x")
    assert check_numerics(read_policy(policy), {"a": nothing})[0].status == "inconclusive"
    for verdict in ("", " "):
        mute = dataclasses.replace(nothing, verdict=verdict, error="the probe timed out")
        assert check_numerics(read_policy(policy), {"a": mute})[0].reason.endswith(": the probe timed out.")
        found = dataclasses.replace(wrong, verdict=verdict)
        assert "weight-only" in check_numerics(read_policy(policy), {"a": found})[0].reason
        assert (
            len(check_numerics(read_policy(policy), {"b": dataclasses.replace(right, verdict=verdict)})[0].reason) > 9
        )


def test_the_report_shows_the_cards_and_names_what_is_not_as_asked(checkpoint, tmp_path):
    from workbench.reporting import build_report

    run = tmp_path / "run"
    wrong = card_of(tmp_path, checkpoint, every_layer(activation="none", scale="", kernel="MarlinNvFp4LinearKernel"))
    failed = NumericsCard(
        arm="y", backend="stock", engine_version="", device="", verdict="could not run: <b>no kernel</b>", error="x"
    )
    records.write_json(run / "server" / "x.numerics.json", wrong)
    records.write_json(run / "server" / "y.numerics.json", failed)
    (run / "server" / "x.facts.json").write_text("[]")  # raw facts are no record
    build_report(run, strict=True)
    page, summary = (run / "report.html").read_text(), (run / "summary.md").read_text()
    for text in (page, summary):
        assert "9 of 9 layers do not run as asked" in text
        assert "MarlinNvFp4LinearKernel" in text
    assert "could not run: &lt;b&gt;no kernel&lt;/b&gt;" in page
    assert "layers 0-2" in page


# ---- stock -----------------------------------------------------------------------------------------------------------


def test_the_stock_server_is_vllms_own_with_the_plugin_switched_off(checkpoint, tmp_path):
    spec = ServeSpec(arm="x", checkpoint=checkpoint, backend="stock", engine=EngineSpec(numerics=True))
    audit = tmp_path / "x.audit.json"
    line, env = command.build_command(spec, port=1, model="x", audit=audit)
    assert env["VLLM_PLUGINS"] == ""
    for ours in ("--load-format", "--hf-overrides", "--model-loader-extra-config"):
        assert ours not in line
    assert line[line.index("--worker-cls") + 1] == WORKER
    assert json.loads(env[JOB])["path"] == str(tmp_path / "x.facts.json")
    line, env = command.build_command(
        dataclasses.replace(spec, backend="emulation", engine=EngineSpec()), port=1, model="x", audit=audit
    )
    assert "--load-format" in line
    assert "--worker-cls" not in line
    assert "VLLM_PLUGINS" not in env
    assert JOB not in env
    with pytest.raises(ConfigError, match="stock is vLLM's own path"):
        ServeSpec(arm="x", checkpoint=checkpoint, backend="stock", format="mxfp4")


def test_a_stock_endpoint_is_recorded_by_what_its_card_says(checkpoint, tmp_path, monkeypatch):
    real = command.build_command

    def build(spec, *, port, model, audit):
        _, env = real(spec, port=port, model=model, audit=audit)
        facts = {"engine_version": "vllm 0.26.0", "rank": 0, "ranks": 1, "device": "a card", "error": ""}
        layers = every_layer(activation="none", scale="", kernel="MarlinNvFp4LinearKernel")
        Path(json.loads(env[JOB])["path"]).write_text(json.dumps({**facts, "seconds": 0.125, "layers": layers}))
        return [sys.executable, str(Path(__file__).with_name("fake_server.py")), "--port", str(port)], env

    monkeypatch.setattr(command, "build_command", build)
    engine = EngineSpec(numerics=True, startup_timeout_s=60)
    spec = ServeSpec(arm="x_stock", checkpoint=checkpoint, backend="stock", engine=engine)
    with start(spec, tmp_path / "x_stock.log") as endpoint:
        card, record = endpoint.numerics(), endpoint.record()
        ready_s = endpoint._ready_s
    assert card is not None
    assert card.verdict.startswith("9 of 9 layers do not run as asked")
    assert (record.weight_format, record.activation_format, record.activation_scale) == ("nvfp4", "none", "none")
    assert record.ready_s == pytest.approx(ready_s - 0.125)
    without = dataclasses.replace(spec, engine=EngineSpec(startup_timeout_s=60))
    monkeypatch.setattr(command, "build_command", lambda s, **k: (build(spec, **k)[0], real(s, **k)[1]))
    with start(without, tmp_path / "y.log") as endpoint:
        assert endpoint.numerics() is None


def settings_of(tmp_path: Path, *overrides: str):
    config = compose(["experiment=kimi_requant", f"paths.out={tmp_path}", *overrides])
    return config, read_settings(config)


def test_a_baseline_adds_one_stock_arm_for_every_checkpoint(tmp_path):
    _, settings = settings_of(tmp_path, "engine.baselines=[stock]")
    added = {name: arm for name, arm in settings.arms.items() if name.endswith("_stock")}
    assert list(added) == ["source_stock", "nvfp4_stock", "mxfp4_direct_stock"]
    assert all(arm.backend.kind == "stock" and arm.optional for arm in added.values())
    assert added["nvfp4_stock"].checkpoint == settings.arms["nvfp4"].checkpoint
    with pytest.raises(ConfigError, match=r"engine\.baselines names 'marlin'"):
        settings_of(tmp_path, "engine.baselines=[marlin]")
    with pytest.raises(ConfigError, match=r"external engine is not started here"):
        settings_of(tmp_path, "engine=external", "engine.base_url=http://h:1/v1", "+engine.baselines=[stock]")


def test_a_stock_arm_that_cannot_start_is_shown_and_the_run_goes_on(tmp_path, monkeypatch):
    config, settings = settings_of(tmp_path, "engine.baselines=[stock]")
    folder = runfolder.open_run(tmp_path, "x", resolved_yaml(config), None)
    run = experiment._Run(settings=settings, folder=folder, say=Progress())
    tried: list[str] = []
    said = "ValueError: Failed to find a kernel that can implement the NVFP4 linear layer."

    def start(self, name, arm):
        tried.append(name)
        if name == "nvfp4_stock":
            (folder.path / "server").mkdir(exist_ok=True)
            (folder.path / "server" / f"{name}.log").write_text(f"INFO loading\n(EngineCore) ERROR {said}\nTraceback\n")
            raise EngineError("the server of arm nvfp4_stock died at start (exit code 1)")

    monkeypatch.setattr(ArmEvaluation, "_evaluate_arm", start)
    run.evaluate()
    assert tried == list(settings.arms)
    card = records.read_json(NumericsCard, folder.path / "server" / "nvfp4_stock.numerics.json")
    assert card.verdict == f"could not run: {said}"
    tried.clear()
    run.evaluate()
    assert "nvfp4_stock" not in tried  # not tried again when the run is resumed
    monkeypatch.setattr(ArmEvaluation, "_evaluate_arm", lambda *_: (_ for _ in ()).throw(EngineError("dead")))
    with pytest.raises(EngineError, match="dead"):  # an arm that was asked for by name must run
        run.evaluate()
    folder.close()
