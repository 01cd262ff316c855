"""`workbench evaluate`, `workbench logprobs` and `workbench kld`: what endpoints answer."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from workbench.commands.arguments import MOST, MOST_TOKENS, Commands, Parser, add_command, to_path, to_text, whole
from workbench.commands.paths import check_file, check_folder, read_text
from workbench.commands.texts import tasks_named
from workbench.errors import ConfigError

if TYPE_CHECKING:
    from workbench.records import Bounded


def add_commands(commands: Commands) -> None:
    help = "run lm-eval tasks against an OpenAI-compatible endpoint"
    add_command(commands, "evaluate", evaluate, _evaluate_options, help)
    help = "an endpoint's top-k log-probabilities of a text, for kld"
    add_command(commands, "logprobs", logprobs, _logprobs_options, help)
    help = "KL divergence of an arm from a reference, from two files of logprobs"
    add_command(commands, "kld", kld, _kld_options, help)


def _evaluate_options(parser: Parser) -> None:
    parser.add_argument("url", help="base URL, ending in /v1")
    parser.add_argument("--model", type=to_text, required=True, help="the model name that the endpoint answers to")
    parser.add_argument("--tokenizer", type=to_path, required=True)
    parser.add_argument("--task", action="append", required=True)
    parser.add_argument("--limit", type=whole(1, MOST))
    parser.add_argument("--num-fewshot", type=whole(0, MOST))
    parser.add_argument("--arm", default="arm")
    parser.add_argument("--concurrency", type=whole(1, MOST), default=16)
    parser.add_argument("--max-length", type=whole(1, MOST_TOKENS), default=2048)
    parser.add_argument("--api", default="completions", choices=["completions", "chat"])
    parser.add_argument("--chat-template", action="store_true", help="lay prompts out with the tokenizer's template")
    parser.add_argument("--thinking", type=to_text, metavar="TAG", help="what ends a think block, e.g. </think>")
    parser.add_argument("--thinking-budget", type=whole(0, MOST_TOKENS), default=0, metavar="TOKENS")
    parser.add_argument("--probe", action="store_true", help="time a few short answers first, and say what to expect")
    parser.add_argument(
        "--fingerprint", default="", help="what the endpoint serves; under the same one an interrupted run goes on"
    )
    parser.add_argument("--baseline-dir", type=to_path, metavar="RUN/eval/ARM", help="compare answer lengths with it")
    parser.add_argument("--out", type=to_path, required=True, metavar="RUN")
    parser.add_argument("--replace", action="store_true", help="drop a finished evaluation of this arm in RUN")


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
        replace=arguments.replace,
        keep=lambda found: records.write_json(out / "scores.json", found),
    )
    if result.transport is not None and result.transport.failed:
        gone, asked = result.transport.failed, result.transport.requests
        say.note(f"{gone} of {asked} requests were never answered: they count as wrong answers")
    say.scores(result)
    return 0


def _logprobs_options(parser: Parser) -> None:
    parser.add_argument("url", help="base URL, ending in /v1")
    parser.add_argument("--model", type=to_text, required=True, help="the model name that the endpoint answers to")
    parser.add_argument("--tokenizer", type=to_path, required=True)
    parser.add_argument("--text", type=to_path, required=True, metavar="FILE")
    parser.add_argument("--out", type=to_path, required=True, metavar="FILE")
    parser.add_argument("--name", default="", help="what to call it; default: the model")
    parser.add_argument("--tokens", type=whole(2, MOST_TOKENS), default=512, help="of a window")
    parser.add_argument("--windows", type=whole(1, MOST), default=64)
    parser.add_argument("--top-k", type=whole(1, MOST), default=20, help="vLLM's limit: --max-logprobs")
    parser.add_argument("--concurrency", type=whole(1, MOST), default=8)
    parser.add_argument(
        "--fingerprint", default="", help="what the endpoint serves; finished windows are kept under it"
    )


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


def _kld_options(parser: Parser) -> None:
    parser.add_argument("reference", type=to_path)
    parser.add_argument("arm", type=to_path)
    parser.add_argument("--json", type=to_path, metavar="FILE", help="also write every figure as JSON")


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
