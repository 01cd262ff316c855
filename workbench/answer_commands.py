"""The commands about answers: evaluate, logprobs, kld, compare, gate; each returns the exit code.

code = answer_commands.compare(arguments)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.commands import check_file, check_folder, read_text, tasks_named
from workbench.errors import ConfigError

if TYPE_CHECKING:
    from workbench.records import Bounded, Comparison, Evaluation, Verdict
    from workbench.reporting.load import RunFiles


def evaluate(arguments: argparse.Namespace) -> int:
    from workbench import records
    from workbench.evaluation.run import check_unfinished, evaluate
    from workbench.progress import Progress
    from workbench.settings import check_arm_name

    check_arm_name("--arm", arguments.arm)
    say = Progress()
    out = arguments.out / "eval" / arguments.arm
    check_folder("--out", out)
    if not arguments.replace:
        check_unfinished(out)
    result = evaluate(
        arm=arguments.arm,
        base_url=arguments.url,
        model=arguments.model,
        tokenizer=arguments.tokenizer,
        tasks=tasks_named(arguments.task, limit=arguments.limit, num_fewshot=arguments.num_fewshot),
        out_dir=out,
        concurrency=arguments.concurrency,
        request_order="forward",
        max_length=arguments.max_length,
        seed=0,
        fingerprint=arguments.fingerprint,
        api=arguments.api,
        chat_template=arguments.chat_template,
        thinking=arguments.thinking or "",
        thinking_budget=arguments.thinking_budget,
        probe=arguments.probe,
        baseline_dir=arguments.baseline_dir,
        progress=say.counter("answers"),
        failed=lambda count, message: say.note(f"{count} failed, also when sent again: {message}"),
    )
    records.write_json(out / "scores.json", result)
    if result.transport is not None and result.transport.failed:
        gone, asked = result.transport.failed, result.transport.requests
        say.note(f"{gone} of {asked} requests were never answered: they count as wrong answers")
    say.scores(result)
    return 0


def logprobs(arguments: argparse.Namespace) -> int:
    """The endpoint's top-k log-probabilities of a text, for `kld`."""
    from workbench.evaluation.kld import collect_logprobs, cut_windows
    from workbench.progress import Progress

    check_file("--out", arguments.out, arguments.text, arguments.tokenizer)
    windows = cut_windows(
        read_text(arguments.text), arguments.tokenizer, tokens=arguments.tokens, count=arguments.windows
    )
    collect_logprobs(
        base_url=arguments.url,
        model=arguments.model,
        windows=windows,
        k=arguments.top_k,
        path=arguments.out,
        name=arguments.name,
        fingerprint=arguments.fingerprint,
        concurrency=arguments.concurrency,
        progress=Progress().counter("windows"),
    )
    print(f"wrote {arguments.out}: {len(windows)} windows of {arguments.tokens} tokens, top {arguments.top_k}")
    return 0


def kld(arguments: argparse.Namespace) -> int:
    """The divergence of two files of `logprobs`."""
    from workbench import records
    from workbench.evaluation._intervals import LEAST
    from workbench.evaluation.kld import kl_divergence

    if arguments.json:
        check_file("--json", arguments.json, arguments.reference, arguments.arm)
    for path in (arguments.reference, arguments.arm):
        if not path.is_file():
            raise ConfigError(f"there is no file {path}", fix="give two files that `workbench logprobs` wrote")
    found = kl_divergence(arguments.reference, arguments.arm)
    if arguments.json:
        records.write_json(arguments.json, found)
    print(
        f"KL({found.reference} || {found.arm}), nats, {found.positions} tokens in {found.windows} windows, k {found.k}"
    )
    for name in ("mean", "median", "p99", "p999"):
        print(f"  {name:6} {_bounded(getattr(found, name))}")
    low, high = found.delta_p_mean_low_pp, found.delta_p_mean_high_pp
    print(
        f"  same first token {100 * found.same_top1:.2f} %"
        f"{_interval(100 * found.same_top1_low, 100 * found.same_top1_high, '.2f')};"
        f" the actual token's probability {found.delta_p_mean_pp:+.3f} pp{_interval(low, high, '+.3f')}"
    )
    if found.windows < LEAST:
        print(f"  no intervals: they take {LEAST} windows, there are {found.windows}")
    print(f"  outside the top {found.k}: {found.tail_mass_reference:.2g} and {found.tail_mass_arm:.2g} of the mass")
    return 0


def _bounded(value: Bounded) -> str:
    return (
        f"at least {value.lower:.4g}{_interval(value.lower_ci_low, value.lower_ci_high, '.4g')},"
        f" at most {value.upper:.4g}{_interval(value.upper_ci_low, value.upper_ci_high, '.4g')}"
    )


def _interval(low: float, high: float, digits: str) -> str:
    """An interval in brackets; nothing where there is none."""
    return "" if low != low else f" ({low:{digits}} to {high:{digits}})"


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
        if path:
            taken = path.is_file() or path.resolve().parent != arguments.run.resolve()
            check_file(f"--{flag}", path, arguments.run if taken else None)
    if arguments.history:
        read_history(arguments.history)  # a damaged one is refused before anything is judged or written
    policy = _policy(arguments.policy)
    for key in ("gated", "reported"):
        if getattr(arguments, key):
            policy[key] = getattr(arguments, key)
    files = load_run(arguments.run)
    if not policy.get("gated"):
        policy = {
            **policy,
            **_arms_judged_by(files),
            **({"reported": arguments.reported} if arguments.reported else {}),
        }
    verdict = judge_files(files, policy, since=None if arguments.update_baseline else arguments.baseline)
    if arguments.json:
        records.write_json(arguments.json, verdict)
    comparison = files.comparison
    trend: list[str] = []
    if arguments.history:
        when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        append_history(arguments.history, verdict, comparison, run=arguments.run.resolve().name, when=when)
        trend = trend_lines(read_history(arguments.history))
    append_step_summary(to_step_summary(verdict, comparison, trend))  # only where $GITHUB_STEP_SUMMARY is set
    if arguments.update_baseline:
        arms = [comparison.baseline] if comparison else []
        arms += [arm for arm in policy["gated"] if arm not in arms]
        write_baseline(arguments.baseline, make_baseline(arguments.run, arms))
        print(f"wrote the baseline {arguments.baseline}: {', '.join(arms)}")
    for line in trend:
        print(one_line(f"trend: {line}"))
    return _say_verdict(verdict)


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

    lines = [
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
