"""The model card: what it says is what was done and measured; the source's own card is kept."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_checkpoints import tiny_tensors, write_checkpoint

from workbench import cli
from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.card import measure_errors
from workbench.checkpoints.convert import quantize_checkpoint
from workbench.checkpoints.recipe import read_recipe
from workbench.checkpoints.transform import Outcome

NVFP4 = {"format": "nvfp4", "dialect": "modelopt"}


def outcome(name: str, power: float, error: float, kind: str = "up_proj") -> Outcome:
    return Outcome(name=name, action="quantize", format="nvfp4", kind=kind, power=power, error=error)


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_errors_are_pooled_over_values_and_the_interval_is_over_matrices():
    rows = measure_errors([outcome("a", 100, 1), outcome("b", 900, 1), outcome("c", 50, 0, "down_proj")])
    assert [(r.kind, r.matrices) for r in rows] == [("up_proj", 2), ("down_proj", 1), ("all", 3)]
    up, down, overall = rows
    assert up.sqnr_db == pytest.approx(10 * math.log10(1000 / 2))
    assert (up.low_db, up.high_db) == pytest.approx((20.0, 10 * math.log10(900)))
    assert (up.worst, up.worst_db) == ("a", pytest.approx(20.0))
    assert down.sqnr_db == math.inf
    assert overall.sqnr_db == pytest.approx(10 * math.log10(1050 / 2))


def test_copied_and_kept_tensors_have_no_error_of_their_own():
    assert measure_errors([Outcome(name="a", action="copy", format="nvfp4"), Outcome(name="b", action="keep")]) == []


def test_the_sums_are_those_of_the_written_values(plain, tmp_path):
    result = quantize_checkpoint(plain, tmp_path / "q", **NVFP4)
    with open_checkpoint(plain) as source, open_checkpoint(tmp_path / "q") as written:
        for found in result.outcomes:
            if found.action == "quantize":
                w, q = source.read_dense(found.name).double(), written.read_dense(found.name).double()
                assert found.power == pytest.approx(float(w.square().sum()))
                assert found.error == pytest.approx(float((w - q).square().sum()))
                assert found.changed == int((w != q).sum())


# ---- the text --------------------------------------------------------------------------------------------------------


def test_the_card_tells_source_recipe_counts_and_errors(plain, tmp_path, input_amax):
    result = quantize_checkpoint(plain, tmp_path / "q", **NVFP4, exclude=["*self_attn*"], input_amax=input_amax)
    card = (tmp_path / "q" / "README.md").read_text()
    with open_checkpoint(plain) as source:
        assert f"`tiny` (plain dialect, fingerprint `{source.fingerprint()}`)" in card
    assert card.startswith("---\ntags:\n- nvfp4\n- modelopt\n")
    assert f"| tensors | {len(result.quantized)} quantized, {len(result.kept)} kept |" in card
    assert f"| nvfp4 | {len(result.quantized)} matrices, scale rule amax |" in card
    assert "| `*self_attn*` | unquantized |" in card
    assert "an expert that saw no token" in card
    overall = measure_errors(result.outcomes)[-1]
    assert (
        f"| all | {overall.matrices} | {overall.sqnr_db:.2f} | {overall.low_db:.2f} to {overall.high_db:.2f} |" in card
    )
    for kind in ("experts.gate_proj", "shared_experts.up_proj", "down_proj"):
        assert f"| {kind} |" in card


@pytest.mark.parametrize(
    "options",
    [
        {**NVFP4, "exclude": ["*self_attn*", "re:.*shared.*"], "rule": "four_over_six", "shared_globals": False},
        {"format": "mxfp4", "dialect": "quark", "include": ["*down_proj"], "weight_only": True},
        {"format": "int4_group", "dialect": "compressed_tensors", "block": (1, 32)},
        {"format": "f32", "dialect": "plain"},
    ],
    ids=lambda options: options["format"],
)
def test_the_command_on_the_card_repeats_the_conversion(plain, tmp_path, monkeypatch, options):
    quantize_checkpoint(plain, tmp_path / "q", **options)
    card = (tmp_path / "q" / "README.md").read_text()
    command = re.search(r"```\n(workbench quantize .*)\n```", card)
    assert command is not None
    words = shlex.split(command[1])[1:]
    monkeypatch.chdir(plain.parent)
    words[2] = str(tmp_path / "again" / "q")
    assert cli.main(words) == 0
    for path in sorted((tmp_path / "q").iterdir()):
        assert path.read_bytes() == (tmp_path / "again" / "q" / path.name).read_bytes(), path.name


@pytest.mark.parametrize("how", [["--calibrate"], ["--calibrate", "--prompts", "own.txt"], ["--activations", "own.st"]])
def test_the_command_on_the_card_measures_the_input_scales_as_the_first_one_did(
    plain, tmp_path, monkeypatch, input_amax, how
):
    monkeypatch.chdir(plain.parent)
    for name in ("own.txt", "own.st"):
        Path(name).write_text("a prompt")
    read = []
    monkeypatch.setattr("workbench.commands.checkpoints.capture", lambda arguments: ("captured", arguments.prompts))
    monkeypatch.setattr(
        "workbench.formats.activations.read_activations",
        lambda file: read.append(file) or SimpleNamespace(input_amax=lambda: input_amax),
    )
    words = ["quantize", plain.name, str(tmp_path / "q"), "--format", "nvfp4", "--dialect", "modelopt", *how]
    assert cli.main(words) == 0
    command = re.search(r"```\nworkbench (quantize .*)\n```", (tmp_path / "q" / "README.md").read_text())
    assert command is not None
    again = shlex.split(command[1])
    again[2] = str(tmp_path / "again" / "q")
    assert cli.main(again) == 0
    assert read[0] == read[1]
    assert (tmp_path / "again" / "q" / "README.md").read_bytes() == (tmp_path / "q" / "README.md").read_bytes()


def test_a_shipped_recipe_is_named_and_its_rules_are_listed(plain, tmp_path):
    quantize_checkpoint(plain, tmp_path / "q", dialect="quark", recipe=read_recipe("quanto_mxfp4_rtn"))
    card = (tmp_path / "q" / "README.md").read_text()
    assert "--recipe quanto_mxfp4_rtn" in card
    assert "| `*shared_experts*` | keep |  |  |" in card
    assert "| `*` | mxfp4 | even |  |" in card


# ---- the source's card -----------------------------------------------------------------------------------------------


@pytest.fixture
def carded(tmp_path: Path) -> Path:
    source = write_checkpoint(tmp_path / "model", tiny_tensors())
    (source / "README.md").write_text("---\nlicense: mit\nlicense_name: x\ntags: [a]\n---\n# Ours\n")
    return source


def test_the_sources_card_is_kept_and_its_licence_carried_over(carded, tmp_path):
    quantize_checkpoint(carded, tmp_path / "q", **NVFP4)
    assert (tmp_path / "q" / "README.source.md").read_bytes() == (carded / "README.md").read_bytes()
    card = (tmp_path / "q" / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\nlicense_name: x\ntags:\n- nvfp4\n")
    assert "README.source" in card


def test_a_second_conversion_keeps_both_earlier_cards(carded, tmp_path):
    quantize_checkpoint(carded, tmp_path / "first", **NVFP4)
    quantize_checkpoint(tmp_path / "first", tmp_path / "second", format="mxfp4", dialect="quark")
    kept = {p.name: p.read_bytes() for p in (tmp_path / "second").glob("README.*")}
    assert kept["README.source.md"] == (carded / "README.md").read_bytes()
    assert kept["README.source-2.md"] == (tmp_path / "first" / "README.md").read_bytes()
    assert b"first" in kept["README.md"]


def test_a_card_without_whole_front_matter_is_carried_and_gives_no_licence(carded, tmp_path):
    (carded / "README.md").write_bytes(b"---\nlicense: mit\n\xff no end")
    quantize_checkpoint(carded, tmp_path / "q", **NVFP4)
    assert (tmp_path / "q" / "README.source.md").read_bytes() == b"---\nlicense: mit\n\xff no end"
    assert "license" not in (tmp_path / "q" / "README.md").read_text()


# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--format", "nvfp5", "--dialect", "modelopt"], "mxfp4"),
        (["--format", "nvfp4", "--dialect", "ggml"], "compressed_tensors"),
        (["--format", "nvfp4", "--dialect", "modelopt", "--scale-rule", "up"], "four_over_six"),
        (["--dialect", "modelopt"], "--recipe"),
        (["--recipe", "mine", "--dialect", "modelopt"], "kimi_k2_6_nvfp4"),
        (["--format", "nvfp4", "--dialect", "modelopt", "--block", "16"], "ROWSxCOLUMNS"),
        (["--format", "nvfp4", "--dialect", "modelopt", "--block", "1x16", "--group-size", "16"], "not allowed"),
        (["--format", "nvfp4", "--dialect", "modelopt", "--group-size", "32"], "columns = 16"),
        (["--format", "nvfp4", "--dialect", "modelopt", "--jobs", "0"], "at least 1"),
    ],
)
def test_bad_flags_exit_3_and_name_the_choices(plain, tmp_path, capsys, words, named):
    assert cli.main(["quantize", str(plain), str(tmp_path / "q"), *words]) == 3
    assert named in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_help_lists_dialects_formats_and_rules_from_the_tables(capsys):
    assert cli.main(["quantize", "--help"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"modelopt +nvfp4 \(amax,.*four_over_six", text)
    assert re.search(r"plain +f32", text)
