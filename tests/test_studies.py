"""The published studies: every command that their READMEs show composes, every checkpoint that they need is made, and
what they measure in miniature is measured. No network: the Hub and the servers of others are local stand-ins.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from workbench.mini_models import MODELS, model_path
from workbench.mini_models.problems import gsm8k_problems

from workbench import cli, records
from workbench.analysis.controls import Controls, run_controls
from workbench.analysis.gemm import analyze_gemm
from workbench.analysis.sentences import judge_sentences
from workbench.analysis.study import Arm, _gemm_arm, analyze_pairs
from workbench.arms import Arms, check_arms
from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.lint import lint_checkpoint
from workbench.checkpoints.selection import linear_weights
from workbench.composition import compose, group_choices
from workbench.errors import CheckpointError, ConfigError
from workbench.experiment import run_experiment
from workbench.formats.activations import write_activations
from workbench.progress import Progress
from workbench.serving.command import build_command
from workbench.serving.vllm_plugin.settings import PluginSettings, plan_modules
from workbench.settings import Settings, read_settings

ROOT = Path(__file__).parent.parent
STUDIES = (
    *("nvfp4_emulation", "kimi_requant", "requant_five_models", "requant_error"),
    *("atom_kimi_k2_5", "file_to_file_mxfp4", "mixed_precision"),
)
MINI = model_path("mini_kimi")


def settings(*overrides: str) -> Settings:
    return read_settings(compose(overrides))


def helper(folder: str, name: str) -> ModuleType:
    """A test helper of another folder, which are no packages."""
    sys.path.insert(0, str(ROOT / "tests" / folder))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(ROOT / "tests" / folder))


# ---- what the READMEs show -------------------------------------------------------------------------------------------


def shown_commands(study: str) -> list[list[str]]:
    text = (ROOT / "experiments" / study / "README.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    lines = [line.split(" # ")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line) for line in lines if line.startswith(("python -m workbench.run", "workbench "))]


@pytest.mark.parametrize("study", STUDIES)
def test_every_study_has_a_readme_with_commands_that_compose(study: str) -> None:
    commands = shown_commands(study)
    assert any(f"experiment={study}" in command for command in commands)
    assert any(command[:3] == ["python", "-m", "workbench.run"] and len(command) == 4 for command in commands)
    for command in commands:
        if command[0] == "workbench":
            cli._parser().parse_args(command[1:])
            continue
        overrides = [word for word in command[3:] if not word.startswith("-")]
        models = [m for word in overrides if word.startswith("model=") for m in word.removeprefix("model=").split(",")]
        for model in models or [""]:
            chosen = [f"model={model}"] if model else []
            check_arms(settings(*[word for word in overrides if not word.startswith("model=")], *chosen))


@pytest.mark.parametrize("study", STUDIES)
def test_a_readme_says_question_publication_outcome_and_hardware(study: str) -> None:
    text = (ROOT / "experiments" / study / "README.md").read_text()
    for heading in ("Question", "Commands", "What was published", "What came out here", "What needs what"):
        assert f"## {heading}\n" in text, heading


@pytest.mark.parametrize("engine", [e for e in group_choices("engine") if e not in ("vllm", "external")])
def test_a_published_command_is_kept_with_its_source_and_its_date(engine: str, tmp_path: Path) -> None:
    text = (ROOT / "conf" / "engine" / f"{engine}.yaml").read_text()
    assert re.search(r"20\d\d-\d\d|model card", text)
    url = [] if engine.startswith("vllm") else ["engine.base_url=http://host:8000/v1"]
    composed = settings("experiment=kimi_requant", f"engine={engine}", *url)
    check_arms(composed)
    assert composed.engine.args
    assert composed.engine.kind == ("vllm" if engine.startswith("vllm") else "external")


def test_the_published_vllm_command_is_what_would_be_started(tmp_path: Path) -> None:
    composed = settings("experiment=kimi_requant", "engine=vllm_nvfp4_mi355", f"model.root={MINI}")
    spec = Arms(settings=composed, say=Progress(), capture=Path).serve_spec("source")
    command, env = build_command(spec, port=8000, model="m", audit=tmp_path / "a.json")
    line = " ".join(command)
    assert "--tool-call-parser kimi_k2 --reasoning-parser kimi_k2" in line
    assert "--mm-encoder-tp-mode data" in line
    assert "--tensor-parallel-size 8" in line
    assert "--enforce-eager" not in command
    assert env["VLLM_ROCM_USE_AITER"] == "1"


# ---- the checkpoints, without a server -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layer inputs of both mini models as a capture writes them, but drawn."""
    widths: dict[str, int] = {}
    for name in MODELS:
        with open_checkpoint(model_path(name)) as checkpoint:
            widths |= {entry.module: entry.shape[-1] for entry in linear_weights(checkpoint)}
    generator = torch.Generator().manual_seed(0)
    rows = {module: torch.randn(16, k, generator=generator).bfloat16() for module, k in widths.items()}
    target = tmp_path_factory.mktemp("inputs") / "activations.safetensors"
    amax = {module: float(x.abs().max()) for module, x in rows.items()}
    write_activations(target, inputs=rows, amax=amax, tokens_seen=dict.fromkeys(rows, 16))
    return target


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


ROUTED, SHARED, DENSE = 4 * 16 * 3, 4 * 3, 3  # matrices of mini-kimi: layers 1 to 4, and layer 0
ATTENTION = 5 * 5
QWEN = 6 * 7  # matrices of mini-qwen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("study", "model", "expected"),
    [
        (
            "nvfp4_emulation",
            "mini_kimi",
            {
                "modelopt": ("modelopt", {"nvfp4": ROUTED}),
                "llmcompressor": ("compressed_tensors", {"nvfp4": ROUTED}),
                "quark": ("quark", {"nvfp4": ROUTED + SHARED}),
            },
        ),
        (
            "nvfp4_emulation",
            "mini_qwen",
            {
                "modelopt": ("modelopt", {"nvfp4": QWEN}),
                "llmcompressor": ("compressed_tensors", {"nvfp4": QWEN}),
                "quark": ("quark", {"nvfp4": QWEN}),
            },
        ),
        ("nvfp4_layers", "mini_kimi", {"all_linear": ("modelopt", {"nvfp4": ROUTED + SHARED + DENSE + ATTENTION})}),
        (
            "requant_five_models",
            "mini_kimi_mixed",
            {
                "online": ("modelopt", {"nvfp4": ROUTED, "fp8_tensor": SHARED + 5}),
                "offline": ("quark", {"mxfp4": ROUTED}),
            },
        ),
        (
            "atom_kimi_k2_5",
            "mini_kimi",
            {
                "w4a16": ("compressed_tensors", {"int4_group": ROUTED}),
                "w4a8": ("compressed_tensors", {"int4_group": ROUTED}),
                "w8a8": ("quark", {"fp8_channel": ROUTED}),
                "mxfp4": ("quark", {"mxfp4": ROUTED}),
            },
        ),
        ("file_to_file_mxfp4", "mini_kimi", {"mxfp4_rtn": ("quark", {"mxfp4": ROUTED + DENSE})}),
    ],
)
def test_every_arm_of_a_study_is_made_by_its_producers_rules_and_linted(
    study: str, model: str, expected: dict[str, tuple[str, dict[str, int]]], inputs: Path, cache: Path
) -> None:
    composed = settings(f"experiment={study}", f"model={model}", f"paths.cache={cache}")
    arms = Arms(settings=composed, say=Progress(), capture=lambda: inputs)
    for name, (dialect, formats) in expected.items():
        folder = arms.folder(composed.arms[name].checkpoint)
        assert not lint_checkpoint(folder).errors
        with open_checkpoint(folder) as checkpoint:
            assert checkpoint.dialect == dialect
            assert Counter(entry.format for entry in checkpoint.entries() if entry.quantized) == formats


@pytest.mark.slow
def test_mixed_precision_is_analyzed_as_it_is_served(inputs: Path, cache: Path, tmp_path: Path) -> None:
    """FP8 beside NVFP4: requantization leaves it, and neither arm's server rounds its inputs."""
    composed = settings("experiment=requant_five_models", "model=mini_kimi_mixed", f"paths.cache={cache}")
    folder = Arms(settings=composed, say=Progress(), capture=lambda: inputs).folder(composed.arms["nvfp4"].checkpoint)
    arms: dict[str, Arm] = {
        "source": (MINI, None, "none"),
        "nvfp4": (folder, None, "auto"),
        "online": (folder, SimpleNamespace(name="mxfp4", rule=None), "auto"),
    }
    pair = SimpleNamespace(first="nvfp4", second="online", direct=None)
    out = {"out": tmp_path, "activations": inputs, "bootstrap": 10, "sample": 24}
    analyze_pairs(source_arm="source", pairs=[pair], arms=arms, **out)
    tensors, gemm = pd.read_parquet(tmp_path / "tensors.parquet"), pd.read_parquet(tmp_path / "gemm.parquet")
    assert set(tensors["first_format"]) == {"nvfp4"}
    assert set(gemm["arm"]) == {"nvfp4", "online"}
    assert json.loads((tmp_path / "analysis.json").read_text())["of"] == ROUTED
    with open_checkpoint(folder) as checkpoint:
        formats = {entry.name: entry.format for entry in checkpoint.entries()}
        plans = {
            "nvfp4": plan_modules(checkpoint, PluginSettings(checkpoint=str(folder), backend="emulation")),
            "online": plan_modules(
                checkpoint, PluginSettings(checkpoint=str(folder), backend="requant", format="mxfp4")
            ),
        }
    whole = analyze_gemm(source=MINI, arms=[_gemm_arm(name, arms) for name in ("nvfp4", "online")], resamples=5)
    assert len(set(whole["name"])) == ROUTED + SHARED + 5
    for row in whole.itertuples():
        plan = plans[row.arm].get(row.name.removesuffix(".weight"))
        expected = (plan.weight, plan.activation) if plan else (formats[row.name], "")
        assert (row.weight_format, row.activation_format) == expected, (row.arm, row.name)


@pytest.mark.slow
def test_a_plan_becomes_a_checkpoint_within_its_budget(inputs: Path, cache: Path, tmp_path: Path) -> None:
    """Planned on one layer's matrices, so that it is quick; the mini model has five."""
    small = one_layer(tmp_path / "small")
    composed = settings(
        "experiment=mixed_precision", f"model.root={small}", f"paths.cache={cache}", "model.name=one-layer"
    )
    arms = Arms(settings=composed, say=Progress(), capture=lambda: inputs)
    planned = composed.arms["planned"].checkpoint
    folder = arms.folder(planned)
    plan = json.loads(folder.with_name(f"{folder.name}.plan.json").read_text())
    assert plan["activations"] == "captured"
    assert 4.25 < plan["bits"] <= 4.5
    chosen = {choice["unit"]: choice["format"] for choice in plan["choices"]}
    assert len(set(chosen.values())) > 1
    with open_checkpoint(folder) as checkpoint:
        formats = {entry.module: entry.format for entry in checkpoint.entries() if entry.projection}
    for choice in plan["choices"]:
        expected = choice["format"].replace("keep", "bf16")
        assert {formats[module] for module in choice["modules"]} == {expected}, choice["unit"]
    again = Arms(settings=composed, say=Progress(), capture=inputs.unlink)  # made before: no second capture
    assert again.folder(planned) == folder
    assert inputs.exists()


def test_a_plan_leaves_no_room_for_other_rules() -> None:
    composed = settings("experiment=mixed_precision", "model.checkpoints.planned.make.format=nvfp4")
    with pytest.raises(ConfigError, match=r"arms\.planned: make\.plan decides"):
        check_arms(composed)


def one_layer(folder: Path) -> Path:
    """mini-kimi's layer 1 alone, as a checkpoint to plan for (no server would load it)."""
    from safetensors.torch import save_file

    with open_checkpoint(MINI) as checkpoint:
        names = [entry.name for entry in checkpoint.entries() if entry.layer == 1 or entry.layer < 0]
        tensors = {name: checkpoint.read(name) for name in names}
        config = {**checkpoint.config, "num_hidden_layers": 2}
    folder.mkdir()
    save_file({name: t for name, t in tensors.items() if isinstance(t, torch.Tensor)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ---- requant_error ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def controls() -> Controls:
    return run_controls(shape=(512, 2048), widths=(256, 1024))


def test_controls_lie_where_the_formats_put_them(controls: Controls) -> None:
    """Bands over an octave, recomputed independently in float64 (2048 x 4096, 8 to 32 phases)."""
    at = {kind: [p for p in controls.octave if p.weights == kind] for kind in ("gaussian", "student_t5", "laplace")}
    assert all(len(points) == 16 for points in at.values())
    for points in at.values():  # NVFP4 does not know the octave
        assert max(p.sqnr_first_db for p in points) - min(p.sqnr_first_db for p in points) < 0.001
    assert all(20.34 < p.sqnr_first_db < 20.54 for p in at["gaussian"])
    assert all(16.26 < p.sqnr_total_db < 17.24 for p in at["gaussian"])
    assert all(18.83 < p.sqnr_direct_db < 19.15 for p in at["gaussian"])
    assert all(16.0 < p.sqnr_total_db < 16.8 for p in at["student_t5"])
    assert all(3.89 < p.loss_db < 4.69 for p in at["student_t5"])
    correlations = [p.corr_e1_e2 for p in at["gaussian"]]
    assert -0.13 < min(correlations) < -0.03
    assert 0.03 < max(correlations) < 0.10
    assert all(abs(p.e2_mean_over_std) < 4 * p.chance for p in controls.distributions)


def test_which_published_sentences_hold_by_the_controls_alone(controls: Controls) -> None:
    holds = {sentence.claim.split(",")[0].rstrip("."): sentence.holds for sentence in controls.sentences}
    assert holds["The error that the second rounding adds has mean zero"] == "holds"
    assert holds["So the tensor as a whole is not shifted in any direction"] == "does not hold"
    assert holds["The errors of both roundings are nearly uncorrelated"] == "under conditions"
    assert holds["The errors are independent"] == "under conditions"
    assert holds["A product over n inputs averages the noise out: signal grows with n"] == "does not hold"
    assert holds["GEMM output SQNR after requantization"] in ("holds", "under conditions")


def test_a_sentence_follows_what_was_measured(controls: Controls) -> None:
    def judged(**changes: Any) -> list[str]:
        octave = [dataclasses.replace(p, **changes) for p in controls.octave]
        distributions = [dataclasses.replace(p, **changes) for p in controls.distributions]
        return [s.holds for s in judge_sentences(distributions, octave, controls.averaging, None)]

    assert judged(e2_mean_over_std=0.1)[0] == "does not hold"
    assert judged(gain_excess=0.001)[1] == "holds"
    assert judged(corr_e1_e2=-0.04)[2] == "holds"
    assert judged(corr_e1_e2=0.6)[2] == "does not hold"
    assert judged(residual_db=0.01)[3] == "holds"
    assert judged(residual_db=2.0)[3] == "does not hold"
    averaging = [dataclasses.replace(p, coherence_gain_db=p.claimed_gain_db) for p in controls.averaging]
    assert judge_sentences(controls.distributions, controls.octave, averaging, None)[4].holds == "holds"
    assert judged(sqnr_total_db=12.0)[5] == "does not hold"
    assert judged(loss_db=3.6)[6] == "holds"


@pytest.fixture(scope="module")
def on_hub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from workbench.checkpoints.convert import quantize_checkpoint

    root = tmp_path_factory.mktemp("hub")
    source, first = one_layer(root / "source"), root / "nvfp4"
    exclude = settings("experiment=requant_error").model.exclude
    quantize_checkpoint(source, first, format="nvfp4", dialect="modelopt", exclude=exclude)
    return {"org/mini": source, "org/mini-nvfp4": first}


@pytest.fixture
def hub(on_hub: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    with helper("checkpoints", "hub_server").HubServer(on_hub) as server:
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield server
        close_session()


HUB = ("experiment=requant_error", "source=hf://org/mini", "first=hf://org/mini-nvfp4")


def test_two_checkpoints_on_the_hub_are_sampled_after_saying_what_will_be_fetched(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: dict[str, int] = {}
    note = Progress.note

    def listen(self: Progress, text: str) -> None:
        said[text] = sum(_tensor_bytes(hub).values())
        note(self, text)

    monkeypatch.setattr(Progress, "note", listen)
    quick = ["analysis.sample=12", "analysis.bootstrap=20", "analysis.controls=false", f"paths.out={tmp_path}"]
    assert run_experiment(compose([*HUB, *quick])) == 0
    run = next(path for path in (tmp_path / "requant_error").iterdir() if path.is_dir())
    analysis = json.loads((run / "analysis.json").read_text())
    (pair,) = analysis["pairs"]
    assert pair["matrices"] == 12
    assert analysis["of"] == ROUTED // 4
    assert 20.2 < pair["sqnr_first_db"]["pooled"] < 20.6
    assert 16.0 < pair["sqnr_total_db"]["pooled"] < 17.3
    assert {row["activations"] for row in analysis["gemm"]} == {"gaussian"}
    fetched = _tensor_bytes(hub)
    for name in ("org/mini", "org/mini-nvfp4"):
        (told,) = (text for text in said if text.startswith("12 of 48 matrices of") and f"{name}:" in text)
        assert said[told] == 0  # before a tensor was read
        times, gigabytes = re.search(r"\((\d+) times ([\d.e-]+) GB\)", told).groups()  # type: ignore[union-attr]
        assert fetched[name] == pytest.approx(int(times) * float(gigabytes) * 1e9, rel=0.01)
    assert not (run / "lint").exists()  # every scale of every matrix: not for a look at twelve


def test_a_source_alone_is_refused_since_its_first_would_be_another_models() -> None:
    with pytest.raises(ConfigError, match="source=hf://org/mini is given alone"):
        settings(*HUB[:2])


def test_a_server_needs_the_whole_checkpoint_and_says_how_to_get_it(hub: Any, tmp_path: Path) -> None:
    stages = "stages=[prepare,lint,analyze,evaluate,compare,gate,report]"
    with pytest.raises(CheckpointError, match="not in the local Hub cache") as refused:
        run_experiment(compose([*HUB, stages, f"paths.out={tmp_path}"]))
    assert "hf download org/mini" in str(refused.value.fix)


def _tensor_bytes(hub: Any) -> Counter[str]:
    """Bytes of tensors asked of each repository; headers begin at a file's first byte, tensors never do."""
    found: Counter[str] = Counter()
    for request in hub.log:
        if request.range is not None and request.range[0] > 0:
            found["/".join(request.path.split("/")[1:3])] += request.range[1] - request.range[0] + 1
    return found


# ---- servers that run elsewhere --------------------------------------------------------------------------------------

RIGHT = {problem["question"]: problem["answer"].rsplit("#### ")[1] for problem in gsm8k_problems(1000, split="test")}


def solve(prompt: str) -> str:
    question = prompt.rpartition("Question: ")[2].removesuffix("\nAnswer:")
    return f" So it is\n#### {RIGHT[question]}" if question in RIGHT else " I cannot say"  # what a probe asks


@pytest.mark.slow
def test_formats_on_servers_of_others_are_compared_without_a_checkpoint_here(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MINI / "tokenizer.json"))

    def decode(prompt: str | list[int]) -> str:  # the start-up probe sends text, the harness tokens
        return prompt if isinstance(prompt, str) else tokenizer.decode(prompt)

    fake = helper("evaluation", "fake_server")
    with fake.fake_server(solve, decode) as good, fake.fake_server(lambda prompt: " It is\n#### -1", decode) as bad:
        urls = {name: f"{(bad if name == 'mxfp4' else good).url}/v1" for name in ("w8a8", "mxfp4")}
        for server in (good, bad):
            server.models = [{"id": "kimi", "object": "model", "max_model_len": 16384}]
        composed = compose(
            [
                *("experiment=atom_kimi_k2_5", "model=kimi_k2_5", "model.root=/nowhere", "engine=atom_kimi_k2_5"),
                *("stages=[evaluate,compare,gate,report]", f"model.tokenizer={MINI}", f"paths.out={tmp_path}"),
                *("~arms.w4a8", "~arms.w4a16_again", "noise_arm=null", "gate.gated=[w8a8,mxfp4]"),
                *("eval.gsm8k_mini_10shot.limit=48", f"engine.base_url={good.url}/v1"),
                *(f"arms.{name}.base_url={url}" for name, url in urls.items()),
            ]
        )
        assert run_experiment(composed) == 1
    run = next(path for path in (tmp_path / "atom_kimi_k2_5").iterdir() if path.is_dir())
    verdict = records.read_json(records.Verdict, run / "verdict.json")
    assert {check.arm for check in verdict.checks if check.status == "fail"} == {"mxfp4"}
    for name, value in {"w4a16": 1.0, "w8a8": 1.0, "mxfp4": 0.0}.items():
        scores = records.read_json(records.Evaluation, run / "eval" / name / "scores.json").scores
        assert {score.filter: score.value for score in scores} == {"strict-match": value, "flexible-extract": value}
        assert {score.num_fewshot for score in scores} == {10}
        server = records.read_json(records.ServerRecord, run / "server" / f"{name}.json")
        assert (server.engine, server.checkpoint[:9]) == ("external", "/nowhere/")
        assert server.args == {"trust_remote_code": True, "kv_cache_dtype": "fp8"}
        assert server.env == {"HSA_NO_SCRATCH_RECLAIM": "1"}
        assert server.peak_rss_bytes is None  # not ours to measure: no ratio can be made of it


# ---- on the real engine ----------------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.slow
def test_the_file_to_file_study_runs_whole(tmp_path: Path) -> None:
    """Two servers, few items; what the rounding costs is a measurement (the study's README), not a test."""
    small = ["eval.mmlu_mini.limit=8", "eval.mmlu_pro_mini.limit=12", "gate.evidence.min_items=8", "kld.windows=4"]
    small += ["gate.margin_pp.default=35", "noise_arm=null"]
    command = [sys.executable, "-m", "workbench.run", "experiment=file_to_file_mxfp4", *small, "~arms.source_again"]
    command += ["analysis.sample=12", "analysis.bootstrap=20"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    run = next(path for path in (tmp_path / "reports" / "file_to_file_mxfp4").iterdir() if path.is_dir())
    server = records.read_json(records.ServerRecord, run / "server" / "mxfp4_rtn.json")
    assert (server.weight_format, server.activation_format) == ("bf16+mxfp4", "mxfp4")
    scores = records.read_json(records.Evaluation, run / "eval" / "mxfp4_rtn" / "scores.json").scores
    found = {score.task: score for score in scores if score.primary}
    assert {task: score.n for task, score in found.items()} == {"mmlu_mini": 8, "mmlu_pro_mini": 12}
    assert found["mmlu_pro_mini"].value > 0.5  # chance is 0.1
