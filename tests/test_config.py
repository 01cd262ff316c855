"""Every configuration that ships composes, and what does not fit is refused by name."""

from __future__ import annotations

import re
import shlex
from importlib.resources import files
from pathlib import Path

import pytest
from omegaconf import open_dict

from workbench import cli
from workbench.composition import compose, policy_file
from workbench.errors import ConfigError
from workbench.evaluation.spec import task_spec
from workbench.settings import Settings, check_arm_name, read_settings

CONF = Path(str(files("workbench.conf")))
README = Path(__file__).parent.parent / "README.md"
EXPERIMENTS = sorted(p.stem for p in (CONF / "experiment").glob("*.yaml"))
MODELS = sorted(p.stem for p in (CONF / "model").glob("*.yaml"))
EVALS = sorted(p.stem for p in (CONF / "eval").glob("*.yaml"))


def settings(*overrides: str) -> Settings:
    return read_settings(compose(overrides))


def needed(model: str) -> list[str]:
    """The values that a model's file leaves to the user."""
    text = (CONF / "model" / f"{model}.yaml").read_text()
    return [f"model.{key}=/data" for key in re.findall(r"^(\w+): \?\?\?", text, re.M)]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.parametrize("model", MODELS)
def test_every_experiment_composes_with_every_model(experiment: str, model: str) -> None:
    composed = settings(f"experiment={experiment}", f"model={model}", *needed(model))
    assert composed.name == experiment
    assert composed.baseline in composed.arms
    if needed(model):  # `model=` alone retargets every arm
        for arm in composed.arms.values():
            assert (arm.checkpoint.path or "/data").startswith("/data")
            assert "mini" not in (arm.checkpoint.path or "")


@pytest.mark.parametrize("model", [m for m in MODELS if needed(m)])
def test_a_model_without_its_folder_is_refused_naming_the_key(model: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.") as refused:
        settings("experiment=kimi_requant", f"model={model}")
    assert needed(model)[0].split("=")[0] in str(refused.value)


@pytest.mark.parametrize("name", EVALS)
def test_every_eval_file_is_a_task_that_evaluation_accepts(name: str) -> None:
    local = [
        f"eval.{name.removesuffix('_local')}.data.{split}=/x.jsonl" for split in ("test",) if name.endswith("_local")
    ]
    shots = {"gsm8k_local": "train", "mmlu_pro_local": "validation"}.get(name)
    local += [f"eval.{name.removesuffix('_local')}.data.{shots}=/x.jsonl"] if shots else []
    composed = settings("experiment=kimi_requant", f"eval=[{name}]", *local)
    assert composed.eval
    for task, node in composed.eval.items():
        assert task_spec({"name": task, **node}).name == task


def test_eval_is_a_list_valued_group() -> None:
    assert set(settings("experiment=kimi_requant", "eval=[gsm8k,mmlu_pro]").eval) == {"gsm8k", "mmlu_pro"}
    assert set(settings("experiment=kimi_requant", "eval=[mmlu_pro]").eval) == {"mmlu_pro"}


def test_mini_full_is_the_real_policy() -> None:
    full = settings("experiment=kimi_requant", "eval=[mini_full]")
    assert {task["limit"] for task in full.eval.values()} == {1000}
    assert full.gate["margin_pp"] == {"default": 2.0}
    assert full.gate["gated"] == ["nvfp4", "nvfp4_to_mxfp4"]
    assert full.gate["reported"] == ["mxfp4_direct"]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("+foo=1", "foo"),
        ("+engine.tensor_paralel_size=2", "tensor_paralel_size"),
        ("engine.port=abc", "engine.port"),
        ("baseline=nobody", "nobody"),
        ("stages=[lint,dance]", "dance"),
        ("arms.nvfp4.backend.kind=magic", "magic"),
        ("arms.nvfp4.backend.compat=sglang", "compat"),
        ("+arms.nvfp4_to_mxfp4.backend.compat=vllm", "emulation"),
        ("arms.source.request_order=random", "random"),
        ("noise_arm=ghost", "ghost"),
        ("noise_arm=source", "noise_arm"),
        ("name=../x", "../x"),
        ("compute.threads=100000", "compute.threads"),
        ("compute.threads=abc", "compute.threads"),
        ("engine.concurrency=0", "engine.concurrency"),
        ("engine.tensor_parallel_size=0", "engine.tensor_parallel_size"),
        ("analysis.bootstrap=-1", "analysis.bootstrap"),
        ("arms.source.concurrency_factor=0", "concurrency_factor"),
        ("stages=[]", "stages"),
        ("stages=[lint,lint]", "stages"),
        ("arms=null", "arms"),
        ("paths.out=''", "paths.out"),
        ("paths.cache=''", "paths.cache"),
        ("model.name=a/b", "model.name"),
        ("+compute.foo=1", "in compute: foo"),
        ("+report.foo=1", "in report: foo"),
        ("seed=4294967296", "seed is 4294967296"),
        ("engine.concurrency=1000001", "engine.concurrency"),
        ("+arms.source.concurrency_factor=inf", "concurrency_factor"),
        ("+arms.source.concurrency_factor=nan", "concurrency_factor"),
        ("model.exclude=[5]", "model.exclude[0] is 5"),
        ("model.exclude=[a,true]", "model.exclude[1] is True"),
        ("model.exclude=[[a]]", "model.exclude[0] is ['a']"),
        ("model.exclude=a", "model.exclude is 'a', expected a list"),
        ("model.checkpoints.nvfp4.make.exclude=[{a: 1}]", "model.checkpoints.nvfp4.make.exclude[0]"),
        ("+arms.nvfp4.exclude=[null]", "arms.nvfp4.exclude[0] is None"),
        ("lint.allow=[1.5]", "lint.allow[0] is 1.5"),
        ("stages=[1]", "stages[0] is 1"),
        ("model.tokenizer=5", "model.tokenizer is 5"),
        ("engine.served_model=1e3", "engine.served_model is 1000.0"),
        ("engine.dtype=true", "engine.dtype is True"),
        ("+engine.env.A=true", "engine.env.A is True"),
        ("analysis.pairs=[5]", "analysis.pairs[0] is 5"),
        ("+model.checkpoints.nvfp4.make.rules=[{match: a, format: nvfp4, block: [x]}]", "rules[0].block[0] is 'x'"),
    ],
)
def test_a_setting_nobody_reads_or_that_does_not_fit_is_refused_by_name(override: str, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        settings("experiment=kimi_requant", override)


@pytest.mark.parametrize("ending", [".facts", ".audit", ".numerics"])
def test_an_arm_that_would_be_taken_for_another_ones_file_is_refused(
    ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    composed = compose(["experiment=kimi_requant"])
    with open_dict(composed):
        composed.arms[f"nvfp4{ending}"] = composed.arms.nvfp4
    with pytest.raises(ConfigError, match=f"server/nvfp4{ending}.json") as refused:
        read_settings(composed)
    assert ending in str(refused.value.fix)
    evaluate = ["evaluate", "http://127.0.0.1:9/v1", "--model", "m", "--tokenizer", "/t", "--task", "gsm8k_mini"]
    for words in (
        [*evaluate, "--arm", f"nvfp4{ending}", "--out", str(tmp_path)],
        ["bench", "serve", "--arm", f"nvfp4{ending}=/x", "--out", str(tmp_path)],
    ):
        assert cli.main(words) == 3
        assert f"server/nvfp4{ending}.json" in capsys.readouterr().err
    check_arm_name("--arm", f"nvfp4{ending}.1")


def test_text_that_looks_like_a_number_is_taken_in_quotes_and_in_an_environment() -> None:
    with pytest.raises(ConfigError, match=r"model\.exclude\[0\]") as refused:
        settings("experiment=kimi_requant", "model.exclude=[5]")
    quoted = str(refused.value.fix).partition("quote it: ")[2].strip("'")
    assert settings("experiment=kimi_requant", quoted).model.exclude == ("5",)
    given = settings("experiment=kimi_requant", "+engine.env.THREADS=4", 'engine.served_model="5"')
    assert given.engine.env == {"THREADS": "4"}
    assert given.engine.served_model == "5"


def test_an_unknown_override_is_refused() -> None:
    with pytest.raises(ConfigError, match="foo"):
        compose(["experiment=kimi_requant", "foo=1"])


def test_no_experiment_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="experiment"):
        settings()


def test_backends_and_formats_of_an_arm_can_be_swapped_by_the_group() -> None:
    swapped = settings("experiment=kimi_requant", "backend@arms.nvfp4.backend=reference")
    assert swapped.arms["nvfp4"].backend.kind == "reference"
    rule = settings("experiment=kimi_requant", "arms.nvfp4_to_mxfp4.format.rule=rceil").arms["nvfp4_to_mxfp4"].format
    assert rule is not None
    assert rule.rule == "rceil"


@pytest.mark.parametrize("policy", sorted(p.stem for p in (CONF / "gate").glob("*.yaml")))
def test_every_policy_is_found_by_name(policy: str) -> None:
    assert policy_file(policy).is_file()


def test_an_unknown_policy_names_the_choices() -> None:
    with pytest.raises(ConfigError, match="nope") as refused:
        policy_file("nope")
    assert "smoke" in str(refused.value)


def readme_commands() -> list[list[str]]:
    blocks = re.findall(r"```(?:bash|sh)?\n(.*?)```", README.read_text(), re.S)
    lines = [line.split(" # ")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line) for line in lines if line.startswith(("python -m workbench.run", "workbench ", "make "))]


@pytest.mark.parametrize("command", readme_commands(), ids=" ".join)
def test_every_command_of_the_readme_composes_or_parses(command: list[str]) -> None:
    if command[0] == "make":
        makefile = (README.parent / "Makefile").read_text()
        assert all(f"\n{target}:" in makefile for target in command[1:] if "=" not in target)
    elif command[0] == "workbench":
        cli._parser().parse_args(command[1:])
    else:
        overrides = [word for word in command[3:] if not word.startswith("-") and word != "job"]
        if any(word.startswith("experiment=") for word in overrides):
            read_settings(compose(overrides))


def test_the_readme_shows_its_two_commands() -> None:
    shown = [" ".join(command) for command in readme_commands()]
    assert "make demo" in shown
    assert "make test" in shown
