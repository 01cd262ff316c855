"""`workbench compare` and `workbench gate`: arms against their baseline, judged by a policy."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.commands.arguments import Commands, Parser, add_command, to_path, to_text
from workbench.commands.paths import check_file
from workbench.entry import complain
from workbench.errors import ConfigError

if TYPE_CHECKING:
    from workbench.records import Comparison, Evaluation, Verdict
    from workbench.reporting.load import RunFiles

_NO_POLICY = "conf/gate, as the run has no policy of its own"


def add_commands(commands: Commands) -> None:
    help = "two evaluated folders, anyone's, by a policy; or the arms of one run"
    add_command(commands, "compare", compare, _compare_options, help)
    add_command(commands, "gate", gate, _gate_options, "judge a run folder by a policy; exits 0, 1 or 2")


def _compare_options(parser: Parser) -> None:
    parser.add_argument("baseline", type=to_path, metavar="A", help="a run, RUN/eval/ARM, or an lm-eval output folder")
    parser.add_argument(
        "candidate", type=to_path, metavar="B", nargs="?", help="the same; without it, A's arms are paired"
    )
    parser.add_argument("--noise", type=to_path, metavar="FOLDER", help="A evaluated again: the noise floor")
    parser.add_argument("--policy", type=to_text, default="default", help="a name of conf/gate, or a YAML file")
    parser.add_argument("--json", type=to_path, metavar="FILE", help="also write figures and verdict as JSON")
    parser.add_argument("--junit", type=to_path, metavar="FILE")
    parser.add_argument(
        "--baseline", dest="baseline_arm", type=to_text, metavar="ARM", help="of one run: default source"
    )
    parser.add_argument("--noise-arm", default="", metavar="ARM", help="of one run")


def compare(arguments: argparse.Namespace) -> int:
    """Judge two folders by a policy; or, of one run, every arm against its baseline."""
    of_two = ("noise",)
    of_one = ("baseline_arm", "noise_arm")
    for name in of_one if arguments.candidate else of_two:
        if getattr(arguments, name):
            flag = "--" + name.replace("_arm", "-arm").replace("baseline-arm", "baseline")
            raise ConfigError(
                f"{flag} is for {'the arms of one run' if arguments.candidate else 'two folders'}",
                fix="drop it, or see `workbench compare --help`",
            )
    return _compare_two(arguments) if arguments.candidate else _compare_arms(arguments)


def _compare_two(arguments: argparse.Namespace) -> int:
    from workbench.comparison import check_apart, compare_evaluations, read_folders

    read = (arguments.baseline, arguments.candidate, arguments.noise)
    _check_outputs(arguments, *read)
    _check_two(*read)
    policy = _policy(arguments.policy)
    arms = read_folders(arguments.baseline, arguments.candidate, arguments.noise)
    check_apart(arms)
    comparison = compare_evaluations(arms)
    evaluations = {arm.name: arm.evaluation for arm in arms}
    return _judge(arguments, {**policy, "gated": [arms[-1].name], "reported": []}, comparison, evaluations)


def _check_outputs(arguments: argparse.Namespace, *read: Path | None) -> None:
    for flag, path in (("--json", arguments.json), ("--junit", arguments.junit)):
        if path:
            check_file(flag, path, *read)


def _judge(
    arguments: argparse.Namespace, policy: dict[str, Any], comparison: Comparison, evaluations: dict[str, Evaluation]
) -> int:
    """Judge a comparison, write what was asked for, print both; the exit code."""
    from workbench import records
    from workbench.comparison import comparison_json, comparison_text
    from workbench.gating import append_step_summary, gate, to_junit, to_step_summary

    verdict = gate(policy, comparison=comparison, evaluations=evaluations)
    if arguments.json:
        records.write_text(arguments.json, comparison_json(comparison, verdict))
    if arguments.junit:
        records.write_text(arguments.junit, to_junit(verdict))
    print(comparison_text(comparison))
    append_step_summary(to_step_summary(verdict, comparison))  # only where $GITHUB_STEP_SUMMARY is set
    return _say_verdict(verdict)


def _check_two(baseline: Path, candidate: Path, noise: Path | None) -> None:
    """Refuse one folder under two names: it would lose nothing to itself, or be its own noise. Raises ConfigError."""
    named = [("the baseline", baseline), ("the candidate", candidate), ("--noise", noise)]
    for i, (name, path) in enumerate(named):
        for other, its in named[:i]:
            if path is not None and its is not None and path.exists() and path.resolve() == its.resolve():
                raise ConfigError(
                    f"{name} and {other} are one folder, {path}", fix="give the folders of two evaluations"
                )


def _compare_arms(arguments: argparse.Namespace) -> int:
    from workbench import records
    from workbench.comparison import compare_arms
    from workbench.records import Evaluation

    run, baseline = arguments.baseline, arguments.baseline_arm or "source"
    if not run.is_dir():
        raise ConfigError(f"there is no folder {run}", fix="give the folder that a run printed")
    _check_outputs(arguments, run)
    policy = _policy(arguments.policy)
    arms = sorted(path.parent.name for path in (run / "eval").glob("*/scores.json"))
    if baseline not in arms:
        raise ConfigError(
            f"{run}/eval has no evaluated arm {baseline!r}",
            fix=f"evaluated arms: {', '.join(arms)}" if arms else "run `workbench evaluate … --out` into it first",
        )
    candidates = [arm for arm in arms if arm != baseline]
    if not candidates:
        raise ConfigError(
            f"{run}/eval has no other arm than {baseline!r}: nothing to compare it with",
            fix="run `workbench evaluate … --arm NAME --out` into it for the arm in question",
        )
    comparison = compare_arms(run, baseline=baseline, candidates=candidates, noise_arm=arguments.noise_arm)
    records.write_json(run / "comparison.json", comparison)
    judged = [arm for arm in candidates if arm != arguments.noise_arm] or candidates
    evaluations = {arm: records.read_json(Evaluation, run / "eval" / arm / "scores.json") for arm in arms}
    return _judge(arguments, {**policy, "gated": judged, "reported": []}, comparison, evaluations)


def _gate_options(parser: Parser) -> None:
    parser.add_argument("run", type=to_path)
    parser.add_argument(
        "--policy", type=to_text, help="a name of conf/gate, or a YAML file; default: the run's own, of its config.yaml"
    )
    parser.add_argument("--gated", action="append", type=to_text, default=[], metavar="ARM")
    parser.add_argument("--reported", action="append", type=to_text, default=[], metavar="ARM")
    parser.add_argument(
        "--baseline", type=to_path, metavar="FILE", help="a committed baseline: judge against it as well"
    )
    parser.add_argument("--update-baseline", action="store_true", help="write --baseline FILE from this run")
    parser.add_argument(
        "--history", type=to_path, metavar="FILE", help="add the verdict to it (JSON lines); print the trend"
    )
    parser.add_argument("--json", type=to_path, metavar="FILE", help="also write the verdict there")


def gate(arguments: argparse.Namespace) -> int:
    """Judge a run; beside the verdict a committed baseline, a history and a step summary."""
    import datetime

    from workbench import records
    from workbench.comparison import make_baseline, one_line, write_baseline
    from workbench.experiment import judge_files
    from workbench.gating import append_history, append_step_summary, read_history, to_step_summary, trend_lines
    from workbench.reporting.load import load_run

    if arguments.update_baseline and not arguments.baseline:
        raise ConfigError("--update-baseline needs --baseline FILE", fix="name the file to write")
    if arguments.baseline and not arguments.update_baseline and not arguments.baseline.is_file():
        raise ConfigError(f"--baseline {arguments.baseline} does not exist", fix="make it once with --update-baseline")
    for flag in ("baseline", "history", "json"):
        path = getattr(arguments, flag)
        if path and (flag != "baseline" or arguments.update_baseline):
            check_file(f"--{flag}", path, arguments.run)
    if arguments.history:
        read_history(arguments.history)  # a damaged one is refused before anything is judged or written
    asked = _policy(arguments.policy) if arguments.policy else None  # one that cannot be read is refused first
    files = load_run(arguments.run)
    policy, policy_from = _own_policy(files) if asked is None else (asked, f"--policy {arguments.policy}")
    for key in ("gated", "reported"):
        if getattr(arguments, key):
            policy[key] = getattr(arguments, key)
    if not policy.get("gated"):
        policy = {
            **policy,
            **_arms_judged_by(files),
            **({"reported": arguments.reported} if arguments.reported else {}),
        }
    since = None if arguments.update_baseline else arguments.baseline
    verdict = judge_files(files, policy, since=since, policy_from=policy_from)
    if arguments.json:
        records.write_json(arguments.json, verdict)
    comparison = files.comparison
    trend: list[str] = []
    if arguments.history:
        when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        append_history(arguments.history, verdict, comparison, run=arguments.run.resolve().name, when=when)
        trend = trend_lines(read_history(arguments.history))
    append_step_summary(to_step_summary(verdict, comparison, trend))  # only where $GITHUB_STEP_SUMMARY is set
    if arguments.update_baseline and verdict.status != "invalid":
        arms = [comparison.baseline] if comparison else []
        arms += [arm for arm in policy["gated"] if arm not in arms]
        write_baseline(arguments.baseline, make_baseline(arguments.run, arms))
        print(f"wrote the baseline {arguments.baseline}: {', '.join(arms)}")
        if verdict.status != "pass":
            print(f"warning: the baseline is of a run that did not pass: its verdict is {verdict.status.upper()}")
    for line in trend:
        print(one_line(f"trend: {line}"))
    code = _say_verdict(verdict)
    if arguments.update_baseline and verdict.status == "invalid":
        complain(
            "--update-baseline: the run's verdict is INVALID, which makes no baseline;"
            f" {arguments.baseline} is as it was",
            "mend what the verdict names, or take another run",
        )
    return code


def _own_policy(files: RunFiles) -> tuple[dict[str, Any], str]:
    """The policy that the run was made with and where it is written, without its arms; the shipped `smoke` where the
    run has none.
    """
    gate = files.settings.get("gate")
    own = {key: gate[key] for key in gate if key not in ("gated", "reported")} if isinstance(gate, dict) else {}
    judges = set(own) - {"name", "note"}  # a section that only names arms is no policy
    return (own, "config.yaml") if judges else (_policy("smoke"), _NO_POLICY)


def _arms_judged_by(files: RunFiles) -> dict[str, list[str]]:
    """gated and reported arms of the experiment that made the run, from its config.yaml; none where it names none."""
    from workbench.comparison import one_line

    gate = files.settings.get("gate")
    named = {key: gate.get(key) for key in ("gated", "reported")} if isinstance(gate, dict) else {}
    found = {key: arms for key, arms in named.items() if isinstance(arms, list) and arms}
    if "gated" not in found:
        return {}
    listed = ", ".join(str(arm) for arm in found["gated"])
    print(one_line(f"gated: {listed} (the arms that the run's config.yaml gates; --gated ARM names others)"))
    return found


# ---- what they share -------------------------------------------------------------------------------------------------


def _policy(name: str) -> dict[str, Any]:
    """A policy by name or path; one of another project is imported, with what that costs said on stderr."""
    from workbench.composition import read_policy_file
    from workbench.gating import import_policy, is_foreign_policy

    policy = read_policy_file(name)
    if not is_foreign_policy(policy):
        return policy
    imported, warnings = import_policy(policy, name=Path(name).stem)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return imported


def _say_verdict(verdict: Verdict) -> int:
    from workbench.comparison import one_line
    from workbench.records.judged import named

    lines = [f"policy: {verdict.policy}, from {verdict.policy_from}"] if verdict.policy_from else []
    lines += [
        f"verdict: {verdict.status.upper()} (exit code {verdict.exit_code}, policy {verdict.policy})",
        verdict.headline,
        *(f"  {check.status}: {named(check)}: {check.reason}" for check in verdict.checks),
    ]
    for found in verdict.attributions:
        caught = ", ".join(found.caught_by) or "nothing"
        lines.append(f"cause: {found.cause}, caught by {caught}. {found.summary}")
        lines += [f"  would tell: {question}" for question in found.would_tell]
    print("\n".join(map(one_line, lines)))
    return verdict.exit_code
