"""`workbench compare` and `workbench gate`: what they print, write and exit with."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench import cli, experiment, records
from workbench.checkpoints.convert import quantize_checkpoint
from workbench.checkpoints.equality import compare_bytes
from workbench.reporting.load import load_run

sys.path[:0] = [str(Path(__file__).parent / room) for room in ("comparison", "checkpoints", "reporting")]

from lm_eval_output import table, write_task  # noqa: E402 - helpers of three rooms, found by the line above
from sample_run import make_sample_run  # noqa: E402
from tiny_checkpoints import tiny_tensors, write_checkpoint  # noqa: E402


def two_folders(tmp_path: Path, both: int, lost: int, gained: int, neither: int) -> list[str]:
    for name, right in zip("ab", table(both, lost, gained, neither), strict=True):
        write_task(tmp_path / name, "gsm8k", right)
    return [str(tmp_path / "a"), str(tmp_path / "b")]


@pytest.mark.parametrize(
    ("lost", "gained", "code", "status"), [(3, 4, 0, "PASS"), (60, 5, 1, "REGRESSION"), (15, 8, 2, "INCONCLUSIVE")]
)
def test_compare_exits_by_the_verdict_of_the_default_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: int, gained: int, code: int, status: str
) -> None:
    folders = two_folders(tmp_path, 1200, lost, gained, 119 - lost - gained)
    outputs = ["--json", str(tmp_path / "out.json"), "--junit", str(tmp_path / "out.xml")]
    assert cli.main(["compare", *folders, *outputs]) == code
    assert f"verdict: {status} (exit code {code}, policy default)" in capsys.readouterr().out
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["rows"][0]["n_pairs"], written["rows"][0]["lost"]) == (1319, lost)
    assert "<testsuite" in (tmp_path / "out.xml").read_text()


def test_a_step_summary_is_appended_where_the_workflow_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    assert cli.main(["compare", *two_folders(tmp_path, 1200, 3, 4, 112)]) == 0
    assert "gsm8k" in (tmp_path / "summary.md").read_text()


@pytest.mark.parametrize(("lost", "code"), [(3, 0), (600, 1)])
def test_anothers_thresholds_are_a_policy_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: int, code: int
) -> None:
    (tmp_path / "vllm.yaml").write_text("model_name: m\naccuracy_threshold: 0.9\nnum_questions: 1319\n")
    folders = two_folders(tmp_path, 1203 - lost, lost, 4, 112)
    assert cli.main(["compare", *folders, "--policy", str(tmp_path / "vllm.yaml")]) == code
    assert "warning: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("margin_pp: 010", "line 1: 010 is a number of another base"),
        ("name: x\nmargin_pp: 1:30", "line 2: 1:30 is a number of another base"),
        ("a: &a [x]\nmargin_pp: 1\nreported: *a", "line 3: a reference (*a) is not read"),
        ("margin_pp: &a {default: 1.0, x: *a}", "line 1: a reference (*a) is not read"),
        ('margin_pp: 1\nname: "x\\nverdict: PASS"', "gate.name="),
        ("margin_pp: 1\nname: ???", "gate.name='???'"),
        ("margin_pp: [" + "[" * 900, "cannot be read"),
    ],
)
def test_a_policy_that_says_something_else_than_it_seems_is_refused_shortly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (tmp_path / "p.yaml").write_text(text)
    assert cli.main(["compare", *two_folders(tmp_path, 12, 0, 0, 0), "--policy", str(tmp_path / "p.yaml")]) == 3
    printed = capsys.readouterr()
    assert message in printed.err
    assert len(printed.err) < 700
    assert "verdict" not in printed.out
    assert "fix: " in printed.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["{a}", "{b}", "--baseline", "source"], "--baseline is for the arms of one run"),
        (["{a}", "{b}", "--noise-arm", "x"], "--noise-arm is for the arms of one run"),
        (["{a}", "--noise", "{b}"], "--noise is for two folders"),
        (["{a}", "--json", "{a}/x.json"], "lies within {a}, which the command reads"),
        (["{a}", "{a}/nowhere"], "there is no folder"),
        (["{a}", "{b}", "--policy", "nope"], "there is no gate policy 'nope'"),
        (["{a}", "{b}", "--json", "{a}"], "is a folder"),
        (["{a}", "{b}", "--json", "{b}/samples_gsm8k_x.jsonl"], "lies within {b}, which the command reads"),
        (["{a}", "{b}", "--junit", "{a}/new.xml"], "lies within {a}, which the command reads"),
        (["{a}", "{a}"], "the candidate and the baseline are one folder"),
        (["{a}", "{b}", "--noise", "{b}"], "--noise and the candidate are one folder"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    a, b = two_folders(tmp_path, 10, 0, 0, 0)
    assert cli.main(["compare", *(flag.format(a=a, b=b) for flag in flags)]) == 3
    printed = capsys.readouterr().err
    assert message.format(a=a, b=b) in printed
    assert "fix: " in printed


def damage(folder: str, task: str, change: Callable[[int, dict[str, Any]], None]) -> Path:
    (path,) = Path(folder).glob(f"samples_{task}_*.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for number, row in enumerate(rows):
        change(number, row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def set_score(value: Any, first: int | None = None) -> Callable[[int, dict[str, Any]], None]:
    def change(number: int, row: dict[str, Any]) -> None:
        row["exact_match"] = value if number == 0 or first is None else row["exact_match"]

    return change


@pytest.mark.parametrize("value", [math.nan, None, "x", [1], math.inf, 10**400], ids=lambda v: str(v)[:5])
def test_one_damaged_score_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: Any
) -> None:
    a, b = two_folders(tmp_path, 1200, 3, 4, 112)
    path = damage(b, "gsm8k", set_score(value, first=0))
    assert cli.main(["compare", a, b]) == 3
    printed = capsys.readouterr().err
    assert f"{path}, line 1: exact_match is" in printed
    assert "fix: " in printed


@pytest.mark.parametrize("value", [math.nan, "x", 0.5, -1, 1e308], ids=str)
def test_a_task_that_is_no_longer_right_or_wrong_is_no_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: Any
) -> None:
    a, b = two_folders(tmp_path, 1200, 3, 4, 112)
    for name in "ab":
        write_task(tmp_path / name, "other", [True] * 700)  # a task that alone would pass
    damage(b, "gsm8k", set_score(value))
    assert cli.main(["compare", a, b]) == 2
    assert "INVALID" in capsys.readouterr().out


def test_a_task_that_the_candidate_lacks_is_no_pass_unless_the_policy_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = two_folders(tmp_path, 1200, 3, 4, 112)
    write_task(tmp_path / "a", "other", [True] * 700)
    assert cli.main(["compare", a, b]) == 2
    assert "was not compared" in capsys.readouterr().out
    (tmp_path / "p.yaml").write_text("name: p\nmargin_pp: 1.0\ntiers: {default: critical, other: advisory}\n")
    assert cli.main(["compare", a, b, "--policy", str(tmp_path / "p.yaml")]) == 0


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[" * 99_999, b'{"filter": ["a"], "doc_id": 0}', None, b""])
def test_a_sample_file_that_is_none_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    a, b = two_folders(tmp_path, 10, 0, 0, 0)
    path = damage(b, "gsm8k", lambda number, row: None)
    path.unlink()
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    assert cli.main(["compare", a, b]) == 3
    printed = capsys.readouterr().err
    assert "traceback" not in printed.lower()
    assert "fix: " in printed


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gate") / "run"
    make_sample_run(folder)
    return folder


def test_a_history_grows_by_a_line_a_verdict(run: Path, tmp_path: Path) -> None:
    gate = ["gate", str(run), "--gated", "nvfp4", "--history", str(tmp_path / "h.jsonl")]
    codes = {cli.main([*gate, "--json", str(tmp_path / "v.json")]) for _ in range(3)}
    assert len(codes) == 1
    assert len((tmp_path / "h.jsonl").read_text().splitlines()) == 3
    assert records.read_json(records.Verdict, tmp_path / "v.json") == records.read_json(
        records.Verdict, run / "verdict.json"
    )


@pytest.mark.parametrize("content", [b'{"when": "x", "ru', b"\xff", b"[" * 99_999])
def test_what_is_no_history_is_left_as_it_is(run: Path, tmp_path: Path, content: bytes) -> None:
    history = tmp_path / "h.jsonl"
    history.write_bytes(content)
    assert cli.main(["gate", str(run), "--gated", "nvfp4", "--history", str(history)]) == 3
    assert history.read_bytes() == content


@pytest.mark.parametrize("damaged", ["scores.json", "baseline"])
def test_a_record_nested_without_end_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damaged: str
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    path = copy / "eval" / "source" / "scores.json" if damaged == "scores.json" else tmp_path / "base.json"
    path.write_text("[" * 99_999)
    commands = {
        "scores.json": ["compare", str(copy)],
        "baseline": ["gate", str(copy), "--gated", "nvfp4", "--baseline", str(path)],
    }
    assert cli.main(commands[damaged]) == 3
    printed = capsys.readouterr().err
    assert f"{path} is no" in printed or f"{path} is not" in printed
    assert "nested too deeply" in printed


def test_an_arm_whose_lint_is_missing_is_invalid(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "lint" / "nvfp4.json").unlink()
    assert cli.main(["gate", str(copy), "--gated", "nvfp4"]) == 2
    checks = records.read_json(records.Verdict, copy / "verdict.json").checks
    assert [c.status for c in checks if c.name == "lint" and c.arm == "nvfp4"] == ["invalid"]


def test_a_margin_under_a_misspelled_task_is_no_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.yaml").write_text("margin_pp: {default: 50.0, GSM8K: 1.0}\n")
    assert cli.main(["compare", *two_folders(tmp_path, 1200, 3, 4, 112), "--policy", str(tmp_path / "p.yaml")]) == 2
    assert "margin_pp names GSM8K, which was not compared; gsm8k was." in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--json", "--history", "--baseline"])
def test_a_gate_does_not_write_over_the_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    before = (copy / "comparison.json").read_bytes()
    more = ["--update-baseline"] if flag == "--baseline" else []
    assert cli.main(["gate", str(copy), "--gated", "nvfp4", flag, str(copy / "comparison.json"), *more]) == 3
    assert "lies within" in capsys.readouterr().err
    assert (copy / "comparison.json").read_bytes() == before
    assert cli.main(["gate", str(copy), "--gated", "nvfp4", flag, str(copy / "new.json"), *more]) == 3
    assert f"write elsewhere, such as {tmp_path / 'new.json'}\n" in capsys.readouterr().err
    assert not (copy / "new.json").exists()


def test_an_invalid_run_makes_no_baseline(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy, base = tmp_path / "run", tmp_path / "base.json"
    shutil.copytree(run, copy)
    (copy / "lint" / "nvfp4.json").unlink()
    gate = ["gate", str(copy), "--gated", "nvfp4", "--baseline", str(base), "--update-baseline"]
    for before in (None, b"{}"):
        if before is not None:
            base.write_bytes(before)
        assert cli.main(gate) == 2
        assert f"INVALID, which makes no baseline; {base} is as it was" in capsys.readouterr().err
        assert (base.read_bytes() if base.exists() else None) == before


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "{c}", "--bits", "4.5", "--out", "{c}/model.safetensors"],
        ["whatif", "{c}", "--out", "{c}/model.safetensors"],
        ["lint", "{c}", "--json", "{c}/config.json"],
        ["bench", "serve", "--arm", "a={c}", "--out", "{c}"],
        ["numerics", "{c}", "--json", "{c}/config.json"],
        ["serve", "{c}", "--numerics", "{c}/config.json"],
        ["calibrate", "{c}", "--prompts", "x", "--out", "{c}/model.safetensors"],
    ],
)
def test_no_command_writes_into_the_checkpoint_that_it_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    folder = write_checkpoint(tmp_path / "c", tiny_tensors())
    before = {f.name: f.read_bytes() for f in Path(folder).iterdir()}
    assert cli.main([part.replace("{c}", str(folder)) for part in command]) == 3
    assert "which the command reads" in capsys.readouterr().err
    assert {f.name: f.read_bytes() for f in Path(folder).iterdir()} == before


def test_a_server_that_ran_something_else_makes_its_arm_invalid(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    layer = records.NumericsRow(
        modules="lm_head", layers="", count=1, kind="linear", method="x", kernel="Marlin", storage="", weights="nvfp4",
        match="exact", weight_error=0.0, activation="none", activation_scale="", residual=0.0,
        asked="nvfp4, activations nvfp4", finding="input not rounded (weight-only)",
    )  # fmt: skip
    card = records.NumericsCard(
        arm="nvfp4", backend="emulation", engine_version="", device="cuda", verdict="1 of 1 layers do not run as asked",
        rows=(layer,), findings=("lm_head: input not rounded (weight-only)",),
    )  # fmt: skip
    records.write_json(copy / "server" / "nvfp4.numerics.json", card)
    assert cli.main(["gate", str(copy), "--gated", "nvfp4"]) == 2
    checks = records.read_json(records.Verdict, copy / "verdict.json").checks
    assert [c.status for c in checks if c.name == "numerics"] == ["invalid"]


def test_a_comparison_of_other_answers_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    comparison = records.read_json(records.Comparison, copy / "comparison.json")
    name = min(comparison.sources)
    assert cli.main(["gate", str(copy), "--gated", "nvfp4"]) != 3
    changed = dataclasses.replace(comparison, sources={**comparison.sources, name: "0" * 64})
    records.write_json(copy / "comparison.json", changed)
    assert cli.main(["gate", str(copy), "--gated", "nvfp4"]) == 3
    assert f"compares other answers than {name} holds now" in capsys.readouterr().err


@pytest.mark.parametrize("limit", ["weights: {min_sqnr_db: N}", "weights: {max_below_median_db: N}",
                                   "evidence: {min_items: N}"])  # fmt: skip
@pytest.mark.parametrize("number", [".inf", "1" + "0" * 400])
def test_a_limit_is_a_number_one_can_reach(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: str, number: str
) -> None:
    (tmp_path / "p.yaml").write_text(f"name: p\nmargin_pp: 1\n{limit.replace('N', number)}\n")
    assert cli.main(["gate", str(run), "--gated", "nvfp4", "--policy", str(tmp_path / "p.yaml")]) == 3
    printed = capsys.readouterr().err
    assert "traceback" not in printed.lower()
    assert "fix: a" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--update-baseline"], "--update-baseline needs --baseline FILE"),
        (["--baseline", "{folder}/none.json"], "none.json does not exist"),
        (["--history", "{folder}"], "is a folder"),
    ],
)
def test_a_gate_refuses_before_it_judges(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert cli.main(["gate", str(run), "--gated", "nvfp4", *(f.format(folder=tmp_path) for f in flags)]) == 3
    assert message in capsys.readouterr().err


def test_bytes_that_a_conversion_leaves_alone(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", tiny_tensors())
    quantize_checkpoint(source, tmp_path / "q", format="nvfp4", dialect="modelopt", exclude=("*self_attn*", "lm_head"))
    found = compare_bytes(source, tmp_path / "q", "nvfp4")
    assert found.compared > 0
    assert (found.differing, found.missing) == ((), ())
    shard = next((tmp_path / "q").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    header = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + header])
    name = next(n for n in entries if n.endswith("norm.weight"))
    data[8 + header + entries[name]["data_offsets"][0]] ^= 1
    shard.write_bytes(data)
    assert compare_bytes(source, tmp_path / "q", "nvfp4").differing == (name,)


def test_a_run_is_judged_by_the_arms_that_its_own_config_gates(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    assert cli.main(["gate", str(copy)]) == 3
    assert "gates no arm" in capsys.readouterr().err
    config = copy / "config.yaml"
    config.write_text(config.read_text() + "gate:\n  gated: [nvfp4]\n  reported: [mxfp4_direct]\n")
    cli.main(["gate", str(copy)])
    printed = capsys.readouterr().out
    assert "gated: nvfp4 (the arms that the run's config.yaml gates; --gated ARM names others)" in printed
    checks = records.read_json(records.Verdict, copy / "verdict.json").checks
    assert {check.arm for check in checks if check.status == "pass" and check.name != "lint"} == {"nvfp4"}
    assert "mxfp4_direct" in {check.arm for check in checks if check.status == "reported"}
    assert "  pass: nvfp4: lint: " in printed
    cli.main(["gate", str(copy), "--gated", "nvfp4_to_mxfp4"])
    assert "config.yaml gates" not in capsys.readouterr().out


def with_policy(run: Path, target: Path, margin: float) -> Path:
    """The sample run with a `gate` section as an experiment writes it."""
    shutil.copytree(run, target)
    config = target / "config.yaml"
    section = {"name": "mine", "margin_pp": {"default": margin}, "gated": ["nvfp4"], "reported": ["mxfp4_direct"]}
    config.write_text(config.read_text() + f"gate: {json.dumps(section)}\n")
    return target


def verdict_of(run: Path) -> records.Verdict:
    return records.read_json(records.Verdict, run / "verdict.json")


def test_a_run_is_judged_by_the_policy_of_its_own_config(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    found = {}
    for margin in (99.0, 0.5):
        copy = with_policy(run, tmp_path / str(margin), margin)
        code = cli.main(["gate", str(copy)])
        verdict = verdict_of(copy)
        found[margin] = {check.status for check in verdict.checks if check.name.startswith("accuracy")}
        assert "policy: mine, from config.yaml\nverdict: " in capsys.readouterr().out
        assert (verdict.policy, verdict.policy_from, verdict.exit_code) == ("mine", "config.yaml", code)
        assert f"Margin: {margin:g} pp a task." in verdict.policy_note
        limits = {check.limit for check in verdict.checks if check.name.startswith("accuracy")}
        assert limits == {margin}
        assert 'name="policy_from" value="config.yaml"' in (copy / "junit.xml").read_text()
        again = experiment.judge(copy, experiment_policy(copy))  # as the run's own gate stage judges
        assert (again.checks, again.policy_sha256) == (verdict.checks, verdict.policy_sha256)
    assert found[99.0] != found[0.5]
    assert "Policy mine, from config.yaml. Margin: 0.5 pp a task." in (tmp_path / "summary.md").read_text()


def experiment_policy(run: Path) -> dict[str, Any]:
    return load_run(run).settings["gate"]


def test_a_policy_that_is_asked_for_wins_over_the_runs_own(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = with_policy(run, tmp_path / "copy", 99.0)
    (tmp_path / "strict.yaml").write_text("name: strict\nmargin_pp: 0.25\n")
    for asked, name, limit in (("release", "release", 2.0), (str(tmp_path / "strict.yaml"), "strict", 0.25)):
        cli.main(["gate", str(copy), "--policy", asked])
        printed = capsys.readouterr().out
        assert f"policy: {name}, from --policy {asked}\n" in printed
        assert "gated: nvfp4 (the arms that the run's config.yaml gates" in printed  # its arms, by that policy
        verdict = verdict_of(copy)
        assert (verdict.policy, verdict.policy_from) == (name, f"--policy {asked}")
        assert {check.limit for check in verdict.checks if check.name.startswith("accuracy")} == {limit}
    cli.main(["report", str(copy)])
    assert f"policy strict, from --policy {tmp_path / 'strict.yaml'}" in html.unescape(
        (copy / "report.html").read_text()
    )
    assert f"policy strict, from --policy {tmp_path / 'strict.yaml'})" in (copy / "summary.md").read_text()


def test_a_run_without_a_policy_of_its_own_is_judged_by_smoke_and_says_so(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "copy")
    cli.main(["gate", str(tmp_path / "copy"), "--gated", "nvfp4"])
    assert "policy: smoke, from conf/gate, as the run has no policy of its own\n" in capsys.readouterr().out
    limits = {check.limit for check in verdict_of(tmp_path / "copy").checks if check.name.startswith("accuracy")}
    assert limits == {10.0}


def test_a_policy_of_the_config_that_is_not_understood_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = with_policy(run, tmp_path / "copy", 99.0)
    config = copy / "config.yaml"
    config.write_text(config.read_text().replace("margin_pp", "margn_pp"))
    assert cli.main(["gate", str(copy)]) == 3
    assert "gate: unknown key 'margn_pp'" in capsys.readouterr().err
