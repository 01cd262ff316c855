"""A comparison is believed only where it is of the answers that lie in the run, and adds up; `compare` of two arms says
what `gate` says.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lm_eval_output import TIME, row, table, write_samples

from workbench import cli
from workbench.records import Evaluation, TaskScore, read_json, write_json

LATER = "2026-06-02T03-04-05.000006"
GOOD = (1200, 3, 4, 112)
BAD = (600, 600, 0, 119)


def evaluate(
    run: Path, arm: str, tasks: dict[str, list[bool]], model: str = "m", time: str = TIME, **counts: int
) -> None:
    """As `workbench evaluate` leaves an arm: scores.json and the sample files, under two filters."""
    scores = []
    for task, right in tasks.items():
        rows = [row(i, float(v), filter_name=f) for f in ("strict", "flexible") for i, v in enumerate(right)]
        path = write_samples(run / "eval" / arm / model, task, rows, time)
        for name in ("strict", "flexible"):
            scores.append(
                TaskScore(
                    arm=arm, task=task, filter=name, metric="exact_match", n=len(right), value=sum(right) / len(right),
                    low=0.0, high=1.0, num_fewshot=0, samples=str(path.relative_to(run)), primary=name == "strict",
                    **{"empty": 0, "truncated": 0, "failed": 0, **counts},
                )
            )  # fmt: skip
    evaluation = Evaluation(
        arm=arm, scores=tuple(scores), command=(), harness="lm-eval 0.4.13", request_order="forward", concurrency=1,
        seconds=1.0,
    )  # fmt: skip
    write_json(run / "eval" / arm / "scores.json", evaluation)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for arm, right in zip(("source", "nvfp4"), table(*GOOD), strict=True):
        evaluate(tmp_path / "run", arm, {"gsm8k": right})
    assert cli.main(["compare", str(tmp_path / "run")]) == 0
    return tmp_path / "run"


def judge(run: Path, *flags: str) -> int:
    return cli.main(["gate", str(run), "--gated", "nvfp4", "--policy", "default", *flags])


def test_two_arms_compared_get_the_verdict_of_their_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(run / "eval" / arm) for arm in ("source", "nvfp4")]
    assert (judge(run), cli.main(["compare", *folders])) == (0, 0)
    evaluate(run, "nvfp4", {"gsm8k": table(*GOOD)[1]}, failed=80, truncated=900, empty=500)
    commands = [["compare", str(run)], ["gate", str(run), "--gated", "nvfp4", "--policy", "default"]]
    for command in (*commands, ["compare", *folders]):
        capsys.readouterr()
        assert cli.main(command) == 2
        printed = capsys.readouterr().out
        for what in ("empty", "truncated", "failed"):
            assert f"inconclusive: nvfp4: {what} answers gsm8k" in printed


def _again_elsewhere(run: Path) -> None:
    evaluate(run, "nvfp4", {"gsm8k": table(*BAD)[1]}, model="served-otherwise", time=LATER)


def _again_beside(run: Path) -> None:
    evaluate(run, "nvfp4", {"gsm8k": table(*BAD)[1]}, time=LATER)


def _another_task(run: Path) -> None:
    for arm, good, bad in zip(("source", "nvfp4"), table(*GOOD), table(*BAD), strict=True):
        evaluate(run, arm, {"gsm8k": good, "mmlu": bad})


def _edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        content = json.loads((run / "comparison.json").read_text())
        change(content)
        (run / "comparison.json").write_text(json.dumps(content))

    return edit


def _no_candidate(content: dict[str, Any]) -> None:
    content["sources"] = {name: known for name, known in content["sources"].items() if "/source/" in name}


def _figure(key: str, value: Any) -> Callable[[Path], None]:
    return _edit(lambda content: content["tasks"][0].__setitem__(key, value))


def _of_another_arm(run: Path) -> None:
    """The figures of an arm that lost one less, with the flips of this one."""
    evaluate(run.parent / "other", "source", {"gsm8k": table(*GOOD)[0]})
    evaluate(run.parent / "other", "nvfp4", {"gsm8k": table(1201, 2, 4, 112)[1]})
    assert cli.main(["compare", str(run.parent / "other")]) == 0
    theirs = json.loads((run.parent / "other" / "comparison.json").read_text())["tasks"]

    def take(content: dict[str, Any]) -> None:
        for own, other in zip(content["tasks"], theirs, strict=True):
            own.update({**other, "flips": own["flips"]})

    _edit(take)(run)


def _as_many_flips_the_other_way(run: Path) -> None:
    _edit(lambda content: content["tasks"][0]["flips"][0].update(direction="gained"))(run)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_again_elsewhere, "does not compare eval/nvfp4/served-otherwise/samples_gsm8k"),
        (_again_beside, "does not compare eval/nvfp4/m/samples_gsm8k_2026-06"),
        (_another_task, "does not compare eval/source/m/samples_mmlu"),
        (_edit(lambda content: content.pop("sources")), "`sources` is empty"),
        (_edit(_no_candidate), "does not compare eval/nvfp4/m/samples_gsm8k"),
        (_figure("n", -5), "do not add up to n -5"),
        (_figure("n", 10**9), "do not add up to n 1000000000"),
        (_figure("lost", -1), "lost -1, gained 4, neither 112 do not add up"),
        (_figure("p_loss", None), "p_loss is nan, expected 0 to 1"),
        (_figure("p_loss", 0.01), "p_loss is 0.01, the table gives 0.773"),
        (_figure("candidate_value", 0.1), "is not the difference of"),
        (_figure("loss_upper95_pp", -5.0), "lies outside its own bounds"),
        (_figure("loss_upper95_pp", None), "loss_upper95_pp is nan"),
        (_figure("loss_upper95_pp", 0.1), "loss_upper95_pp is 0.1, the table gives 0.2985"),
        (
            _of_another_arm,
            "tasks[0] (nvfp4 gsm8k strict exact_match): candidate_value is 0.9136 (1205 of 1319 right), "
            "the scores of nvfp4 say 0.9128",
        ),
        (_edit(lambda content: content["tasks"][0]["flips"].pop()), "gained is 4, its flips hold 3 gained"),
        (_as_many_flips_the_other_way, "lost is 3, its flips hold 2 lost"),
        (_edit(lambda content: content["tasks"].pop(0)), "no row of nvfp4 gsm8k strict exact_match, which source and "),
    ],
)
def test_what_is_stale_or_does_not_add_up_is_to_be_compared_again(
    run: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], message: str
) -> None:
    damage(run)
    assert judge(run) == 3
    printed = capsys.readouterr().err
    assert message in printed
    assert f"fix: compare again: workbench compare {run} --baseline source" in printed
    code = 1 if damage in (_again_elsewhere, _again_beside, _another_task) else 0
    assert cli.main(["compare", str(run)]) == code  # and that is the way out
    assert judge(run) == code


def test_of_many_flips_the_known_number_is_kept(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for counts, kept in (((1000, 40, 60, 219), (25, 25)), ((1000, 10, 90, 219), (10, 40))):
        for arm, right in zip(("source", "nvfp4"), table(*counts), strict=True):
            evaluate(run, arm, {"gsm8k": right})
        assert cli.main(["compare", str(run)]) == judge(run)
        flips = json.loads((run / "comparison.json").read_text())["tasks"][0]["flips"]
        assert tuple(sum(flip["direction"] == d for flip in flips) for d in ("lost", "gained")) == kept
        _edit(lambda content: content["tasks"][0]["flips"].pop())(run)
        capsys.readouterr()
        assert judge(run) == 3
        said = f"gained is {counts[2]}, of which {kept[1]} are kept, its flips hold {kept[1] - 1} gained"
        assert said in capsys.readouterr().err


def test_a_copied_arm_is_told_by_the_name_in_its_scores(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "eval" / "nvfp4")
    shutil.copytree(run / "eval" / "source", run / "eval" / "nvfp4")
    said = f"{run}/eval/nvfp4/scores.json names the arm 'source', and stands for 'nvfp4'"
    two = ["compare", *(str(run / "eval" / arm) for arm in ("source", "nvfp4"))]
    for command in (["compare", str(run)], two, ["gate", str(run), "--gated", "nvfp4", "--policy", "default"]):
        capsys.readouterr()
        assert cli.main(command) == 3
        assert said in capsys.readouterr().err
    assert not (run / "verdict.json").exists()
    (run / "comparison.json").unlink()
    assert judge(run) != 0


def test_an_arm_without_scores_is_invalid(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "eval" / "nvfp4" / "scores.json").unlink()
    assert judge(run) == 2
    assert (
        "Invalid: nvfp4: evaluation. its answers were compared, but its scores.json is gone" in capsys.readouterr().out
    )


def test_scores_of_another_accuracy_or_number_than_the_samples_are_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "eval" / "nvfp4" / "scores.json"
    evaluation = read_json(Evaluation, path)
    for value in (0.2, float("nan")):
        scores = tuple(dataclasses.replace(score, value=value) for score in evaluation.scores)
        write_json(path, dataclasses.replace(evaluation, scores=scores))
        assert cli.main(["compare", str(run)]) == 3
        assert f"the scores say exact_match {value:.4f}, the sample files hold 0.9128" in capsys.readouterr().err
    scores = tuple(dataclasses.replace(score, n=1300) for score in evaluation.scores)
    write_json(path, dataclasses.replace(evaluation, scores=scores))
    assert judge(run) == 3
    assert "n is 1319, the scores of nvfp4 say 1300" in capsys.readouterr().err


def test_two_arms_of_one_file_are_not_compared(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = (run / "eval" / arm / "m" / f"samples_gsm8k_{TIME}.jsonl" for arm in ("nvfp4", "source"))
    ours.unlink()
    ours.symlink_to(theirs)
    assert cli.main(["compare", str(run)]) == 3
    assert "is one file for 'source' and 'nvfp4'" in capsys.readouterr().err
    assert judge(run) == 3


def test_a_committed_baseline_that_lacks_what_is_judged_is_no_pass(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "baseline.json"
    assert judge(run, "--baseline", str(path), "--update-baseline") == 0
    assert "did not pass" not in capsys.readouterr().out
    assert judge(run, "--baseline", str(path)) == 0
    stored = json.loads(path.read_text())
    source, nvfp4 = stored["arms"]["source"], stored["arms"]["nvfp4"]
    for arms in ({}, {"source": source}, {"source": source, "nvfp4": []}, {"source": source, "nvfp4": nvfp4[1:]}):
        path.write_text(json.dumps({**stored, "arms": arms}))
        capsys.readouterr()
        assert judge(run, "--baseline", str(path)) == 2
        assert "since baseline gsm8k" in capsys.readouterr().out
    path.write_text(json.dumps({**stored, "arms": {**stored["arms"], "gone": source}}))
    assert judge(run, "--baseline", str(path)) == 0
    assert "reported: since baseline: arm 'gone' of the baseline is not in this run" in capsys.readouterr().out


def test_a_torn_history_stops_the_gate_before_it_judges(run: Path, tmp_path: Path) -> None:
    history = tmp_path / "h.jsonl"
    assert judge(run, "--history", str(history)) == 0
    (run / "verdict.json").unlink()
    whole = history.read_bytes()
    history.write_bytes(whole + whole[:50])
    assert judge(run, "--history", str(history)) == 3
    assert history.read_bytes() == whole + whole[:50]
    assert not (run / "verdict.json").exists()
    history.write_bytes(whole.rstrip(b"\n"))
    assert judge(run, "--history", str(history)) == 0
    assert len(history.read_bytes().splitlines()) == 2


def test_the_arms_of_a_run_are_judged_as_two_folders_are(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate(run, "nvfp4", {"gsm8k": table(*BAD)[1]})
    evaluate(run, "again", {"gsm8k": table(*BAD)[1]})
    folders = [str(run / "eval" / arm) for arm in ("source", "nvfp4")]
    (tmp_path / "wide.yaml").write_text("name: wide\nmargin_pp: 60\n")
    capsys.readouterr()
    for policy, code in (("default", 1), (str(tmp_path / "wide.yaml"), 0)):
        assert cli.main(["compare", *folders, "--policy", policy]) == code
        of_two = capsys.readouterr().out
        out = tmp_path / "out.json"
        assert cli.main(["compare", str(run), "--policy", policy, "--noise-arm", "again", "--json", str(out)]) == code
        of_one = capsys.readouterr().out
        said = [line for line in of_two.splitlines() if ": nvfp4: accuracy gsm8k strict: " in line]
        assert said
        assert all(line in of_one for line in said)
        assert {check["arm"] for check in json.loads(out.read_text())["verdict"]["checks"]} == {"nvfp4"}
    assert cli.main(["compare", str(run), "--policy", "nope"]) == 3


def test_a_baseline_of_a_run_that_lost_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, base = tmp_path / "run", tmp_path / "base.json"
    for arm, right in zip(("source", "nvfp4"), table(*BAD), strict=True):
        evaluate(run, arm, {"gsm8k": right})
    assert cli.main(["compare", str(run)]) == 1
    assert judge(run, "--baseline", str(base), "--update-baseline") == 1
    assert "did not pass: its verdict is REGRESSION" in capsys.readouterr().out
    assert base.is_file()


def test_a_baseline_that_lies_within_the_run_can_be_read(run: Path, tmp_path: Path) -> None:
    assert judge(run, "--baseline", str(tmp_path / "base.json"), "--update-baseline") == 0
    (tmp_path / "base.json").rename(run / "base.json")
    for _ in range(2):
        assert judge(run, "--baseline", str(run / "base.json")) == 0
