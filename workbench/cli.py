"""The `workbench` command: one stage at a time, on plain paths.

    workbench lint PATH
    workbench quantize SRC DST --format nvfp4 --dialect modelopt --exclude '*self_attn*' --calibrate
    workbench quantize SRC DST --recipe kimi_k2_6_nvfp4 --dialect modelopt --jobs 2 --resume
    workbench serve PATH --backend emulation
    workbench numerics PATH --backend stock
    workbench analyze --source SOURCE --first FIRST --second mxfp4 --out FOLDER
    workbench evaluate URL --model NAME --tokenizer PATH --task gsm8k_mini --out FOLDER
    workbench report RUN --figures
    workbench report RUN RUN --serve
    workbench bench kernels --device cpu
    workbench bench serve --requant CHECKPOINT --format mxfp4 --out FOLDER

Exit codes: 0 done (or clean, or pass), 1 lint findings or a regression, 2 inconclusive or invalid, 3 could not run:
also for a bad flag. Imports that take time stand inside the commands.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import workbench
from workbench import analysis_commands, answer_commands, bench_commands, commands
from workbench.entry import COULD_NOT_RUN, explain, safe_streams
from workbench.errors import WorkbenchError
from workbench.flags import in_flags
from workbench.interrupt import terminable

MOST = 1_000_000  # of whatever is counted: above it lies a typing mistake
MOST_TOKENS = (1 << 31) - 1


class _Parser(argparse.ArgumentParser):
    """argparse exits 2 on a bad flag; 2 means "inconclusive" here. epilog_of: what only --help takes time to say."""

    epilog_of: Callable[[], str] | None = None

    def format_help(self) -> str:
        if self.epilog_of is not None:
            self.epilog = self.epilog_of()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(COULD_NOT_RUN, f"error: {message}\n  fix: see `{self.prog} --help`\n")


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code. --help and --version exit 0."""
    safe_streams()
    try:
        code = _run(argv)
        sys.stdout.flush()  # a full disk or a reader that has gone is found here, not at the interpreter's end
        return code
    except BaseException as error:
        return explain(error, again="run it again")


def _run(argv: list[str] | None) -> int:
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:  # --help, --version, or a bad flag
        return stop.code if isinstance(stop.code, int) else 0
    command: Callable[[argparse.Namespace], int] = arguments.command
    with terminable():
        try:
            return command(arguments)
        except WorkbenchError as error:
            known = vars(arguments).keys()
            error.message, error.fix = in_flags(error.message, known), in_flags(error.fix, known)
            raise


# ---- arguments -------------------------------------------------------------------------------------------------------


def _whole(least: int, most: int) -> Callable[[str], int]:
    """A whole number within bounds."""

    def whole(text: str) -> int:
        if not text.removeprefix("-").isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
        return int(text)

    return whole


def _bits(text: str) -> float:
    """Bits a weight, 1 to 32."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 32:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bits from 1 to 32")
    return value


def _text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return text


def _path(text: str) -> Path:
    return Path(_text(text))


def _pair(item: str) -> tuple[str, str]:
    key, sign, value = item.partition("=")
    if not sign or not key:
        raise argparse.ArgumentTypeError(f"{item!r} is not KEY=VALUE, e.g. max_num_seqs=64")
    return key, value


def _block(text: str) -> tuple[int, int]:
    """`128x128` as (rows, columns)."""
    rows, _, columns = text.partition("x")
    if not (rows.isdecimal() and columns.isdecimal() and int(rows) > 0 and int(columns) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWSxCOLUMNS")
    return int(rows), int(columns)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="workbench", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--version", action="version", version=f"workbench {workbench.__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, function: Callable[[argparse.Namespace], int], help: str) -> _Parser:
        sub = subparsers.add_parser(name, help=help, description=help)
        sub.set_defaults(command=function)
        return sub

    lint = add("lint", commands.lint, "check a checkpoint's bytes against its own claims")
    lint.add_argument("path", type=_path)
    lint.add_argument("--allow", action="append", default=[], metavar="CHECK", help="show, but do not fail on, a check")
    lint.add_argument("--json", type=_path, metavar="FILE", help="also write the findings as JSON, with all names")
    lint.add_argument("--all-scales", action="store_true", help="read block scales beyond 1 GiB whole, not in samples")
    lint.add_argument("--all-values", action="store_true", help="the same of plain weights and FP8 codes")
    lint.add_argument(
        "--tensor-parallel",
        action="append",
        type=int,
        default=[],
        metavar="N",
        help="a size it is to be served with: what does not split is an error",
    )

    quantize = add("quantize", commands.quantize, "convert a checkpoint, shard by shard")
    quantize.formatter_class = argparse.RawDescriptionHelpFormatter
    quantize.epilog_of = commands.written_formats
    quantize.add_argument("source", type=_text, help="a folder, or hf://org/name")
    quantize.add_argument("destination", type=_path)
    quantize.add_argument("--format", help="a number format of the table below, bf16 or f32")
    quantize.add_argument("--dialect", required=True, help="the producer's layout to write")
    quantize.add_argument(
        "--scale-rule",
        "--rule",
        dest="rule",
        metavar="RULE",
        help="how scales are chosen; a format's first is its default",
    )
    size = quantize.add_mutually_exclusive_group()
    size.add_argument("--block", type=_block, metavar="RxC", help="rows x columns that share a scale, e.g. 128x128")
    size.add_argument(
        "--group-size", type=lambda text: _block(f"1x{text}"), dest="block", metavar="N", help="the same as --block 1xN"
    )
    quantize.add_argument(
        "--exclude", action="append", default=[], metavar="GLOB", help="modules that stay unquantized"
    )
    quantize.add_argument(
        "--include", action="append", default=[], metavar="GLOB", help="quantize only these; a name may add lm_head"
    )
    quantize.add_argument(
        "--recipe", type=_text, metavar="NAME", help="rules by module: a name of conf/recipe, or a YAML file"
    )
    quantize.add_argument("--weight-only", action="store_true", help="activations stay unquantized")
    quantize.add_argument("--no-shared-globals", action="store_true", help="a global scale per matrix")
    quantize.add_argument("--calibrate", action="store_true", help="run the source under vLLM and write input_scale")
    quantize.add_argument("--activations", type=_path, metavar="FILE", help="calibrate from a captured file instead")
    quantize.add_argument("--jobs", type=int, default=1, metavar="N", help="tensors converted at once, in threads")
    quantize.add_argument(
        "--resume", action="store_true", help="go on where the same conversion was killed; keep what is done if stopped"
    )
    quantize.add_argument("--overwrite", action="store_true", help="replace an existing destination")
    _add_capture(quantize)

    calibrate = add(
        "calibrate", commands.calibrate, "record every layer's real inputs (amax, moments, a sample) under vLLM"
    )
    calibrate.add_argument("source", type=_text)
    calibrate.add_argument("--out", type=_path, required=True, metavar="FILE")
    calibrate.add_argument(
        "--second-moments",
        choices=["none", "diagonal", "full"],
        default="diagonal",
        help="E[x x^T] of each input over all its tokens, for `analyze --products moments`; full: K^2 numbers each",
    )
    calibrate.add_argument(
        "--second-moments-mb",
        type=_whole(1, MOST),
        default=1024,
        metavar="MB",
        help="of all full ones; inputs beyond it keep their diagonal",
    )
    calibrate.add_argument(
        "--rows", type=_whole(1, MOST), default=256, metavar="N", help="of each input, sampled from all its tokens"
    )
    _add_capture(calibrate)

    analyze = add("analyze", analysis_commands.analyze, "weight error of one or two quantizations, matrix by matrix")
    analyze.add_argument("source_path", type=_path, nargs="?", metavar="SOURCE", help="the producer's original")
    analyze.add_argument("first_path", type=_path, nargs="?", metavar="FIRST", help="the quantized checkpoint")
    analyze.add_argument("--source", type=_path, metavar="SOURCE", help="the same; without one, what needs no source")
    analyze.add_argument("--first", type=_path, metavar="FIRST", help="the same; without one, source to --second")
    analyze.add_argument(
        "--second", type=_text, default="mxfp4", help="format to requantize to, or a checkpoint's folder"
    )
    for of in ("source", "first", "second"):
        analyze.add_argument(f"--{of}-arm", default=of, metavar="ARM", help=f"its name in a run; default: {of}")
    analyze.add_argument("--rule", help="scale rule of the second quantization")
    analyze.add_argument("--select", type=_text, metavar="GLOB", help="only matrices of these names")
    analyze.add_argument("--sample", type=_whole(1, MOST), metavar="N", help="about N matrices, of every kind")
    analyze.add_argument("--activations", type=_path, metavar="FILE", help="a file that `workbench calibrate` wrote")
    analyze.add_argument(
        "--products",
        choices=["auto", "gaussian", "moments", "none"],
        default="auto",
        help="output noise of matrix products; auto: with --activations only; moments: expected, weights only",
    )
    analyze.add_argument(
        "--bootstrap", type=_whole(1, MOST), default=1000, help="resamples of matrix products' intervals"
    )
    analyze.add_argument("--device", type=_text, default="cpu", help="cpu, or cuda (cuda:1) for one GPU: the weights")
    analyze.add_argument(
        "--compute", choices=["local", "ray"], default="local", help="ray: weights as tasks of a cluster"
    )
    analyze.add_argument(
        "--ray-address", type=_text, metavar="HOST:PORT", help="default: $RAY_ADDRESS, else started here"
    )
    analyze.add_argument("--ray-cpus", type=_whole(1, MOST), metavar="N", help="processors of a task; default 1")
    analyze.add_argument("--seed", type=_whole(0, MOST), default=0)
    analyze.add_argument("--out", type=_path, required=True, metavar="FOLDER")

    sensitivity = add(
        "sensitivity", analysis_commands.sensitivity, "round one unit at a time, run the model, measure its answers"
    )
    sensitivity.add_argument("source", type=_path)
    sensitivity.add_argument("--format", action="append", metavar="NAME", help="default: mxfp4, nvfp4, fp8_channel")
    sensitivity.add_argument("--granularity", choices=["layer", "expert"], help="what is rounded at once")
    sensitivity.add_argument("--round-activations", action="store_true", help="the inputs pass the format as well")
    sensitivity.add_argument("--subsets", type=_whole(0, MOST), metavar="N", help="random choices of units; default 8")
    sensitivity.add_argument(
        "--recipe", action="append", type=_text, metavar="NAME", help="measure recipes or formats, not units"
    )
    sensitivity.add_argument("--select", type=_text, metavar="GLOB", help="only matrices of these names")
    sensitivity.add_argument("--exclude", action="append", type=_text, default=[], metavar="GLOB")
    sensitivity.add_argument("--device", type=_text, default="cpu", help="cpu, or cuda for one GPU")
    sensitivity.add_argument("--seed", type=_whole(0, MOST), default=0)
    sensitivity.add_argument("--out", type=_path, required=True, metavar="FOLDER")
    _add_text(sensitivity, tokens=256, windows=16)

    plan = add("plan", analysis_commands.plan, "a mixed-precision recipe within a budget of bits")
    plan.add_argument("source", type=_path)
    plan.add_argument("--bits", type=_bits, required=True, help="stored bits a weight, scales included")
    plan.add_argument("--format", action="append", metavar="NAME", help="to choose among; default: mxfp4, nvfp4, ...")
    plan.add_argument("--sensitivity", type=_path, metavar="FOLDER", help="decide by what `sensitivity` measured")
    plan.add_argument("--activations", type=_path, metavar="FILE", help="a file that `workbench calibrate` wrote")
    plan.add_argument("--granularity", choices=["layer", "expert"], help="what shares a format; default: layer")
    plan.add_argument("--select", type=_text, metavar="GLOB", help="only matrices of these names")
    plan.add_argument(
        "--exclude", action="append", type=_text, default=[], metavar="GLOB", help="these stay as they are"
    )
    plan.add_argument("--json", type=_path, metavar="FILE", help="also write every choice as JSON")
    plan.add_argument("--out", type=_path, required=True, metavar="RECIPE", help="the recipe, for `quantize --recipe`")

    whatif = add("whatif", analysis_commands.whatif, "predict formats, rules and block sizes from the weights alone")
    whatif.add_argument("source", type=_path)
    whatif.add_argument("--first", type=_path, metavar="FIRST", help="a quantized checkpoint of it, as stored")
    whatif.add_argument("--sample", type=_whole(1, MOST), metavar="N", help="about N matrices, of every kind")
    whatif.add_argument("--select", type=_text, metavar="GLOB", help="only matrices of these names")
    whatif.add_argument("--exclude", action="append", type=_text, default=[], metavar="GLOB")
    whatif.add_argument("--seed", type=_whole(0, MOST), default=0)
    whatif.add_argument("--out", type=_path, metavar="FILE", help="also write every matrix's figures as parquet")
    whatif.add_argument("--verify", type=_whole(1, MOST), metavar="N", help="serve the N best, one by one; measure KL")
    whatif.add_argument("--verify-out", type=_path, metavar="FOLDER", help="log-probabilities, logs, verification.json")
    whatif.add_argument("--top-k", type=_whole(1, MOST), default=20, help="of --verify")
    _add_text(whatif, tokens=512, windows=64)

    serve = add("serve", commands.serve, "serve a checkpoint through a backend on vLLM until Ctrl-C")
    _add_serving(serve, port=8000, log=Path("workbench-serve.log"))
    serve.add_argument("--numerics", type=_path, metavar="FILE", help="probe what runs; write the card there")

    numerics = add(
        "numerics", commands.numerics, "start a server and tell what every layer of it really runs; 1: not as asked"
    )
    _add_serving(numerics, port=0, log=Path("workbench-numerics.log"))
    numerics.add_argument("--json", type=_path, metavar="FILE", help="also write the card as JSON")

    evaluate = add("evaluate", answer_commands.evaluate, "run lm-eval tasks against an OpenAI-compatible endpoint")
    evaluate.add_argument("url", help="base URL, ending in /v1")
    evaluate.add_argument("--model", type=_text, required=True, help="the model name that the endpoint answers to")
    evaluate.add_argument("--tokenizer", type=_path, required=True)
    evaluate.add_argument("--task", action="append", required=True)
    evaluate.add_argument("--limit", type=_whole(1, MOST))
    evaluate.add_argument("--num-fewshot", type=_whole(0, MOST))
    evaluate.add_argument("--arm", default="arm")
    evaluate.add_argument("--concurrency", type=_whole(1, MOST), default=16)
    evaluate.add_argument("--max-length", type=_whole(1, MOST_TOKENS), default=2048)
    evaluate.add_argument("--api", default="completions", choices=["completions", "chat"])
    evaluate.add_argument("--chat-template", action="store_true", help="lay prompts out with the tokenizer's template")
    evaluate.add_argument("--thinking", type=_text, metavar="TAG", help="what ends a think block, e.g. </think>")
    evaluate.add_argument("--thinking-budget", type=_whole(0, MOST_TOKENS), default=0, metavar="TOKENS")
    evaluate.add_argument("--probe", action="store_true", help="time a few short answers first, and say what to expect")
    evaluate.add_argument(
        "--fingerprint", default="", help="what the endpoint serves; under the same one an interrupted run goes on"
    )
    evaluate.add_argument("--baseline-dir", type=_path, metavar="RUN/eval/ARM", help="compare answer lengths with it")
    evaluate.add_argument("--out", type=_path, required=True, metavar="RUN")
    evaluate.add_argument("--replace", action="store_true", help="drop a finished evaluation of this arm in RUN")

    logprobs = add("logprobs", answer_commands.logprobs, "an endpoint's top-k log-probabilities of a text, for kld")
    logprobs.add_argument("url", help="base URL, ending in /v1")
    logprobs.add_argument("--model", type=_text, required=True, help="the model name that the endpoint answers to")
    logprobs.add_argument("--tokenizer", type=_path, required=True)
    logprobs.add_argument("--text", type=_path, required=True, metavar="FILE")
    logprobs.add_argument("--out", type=_path, required=True, metavar="FILE")
    logprobs.add_argument("--name", default="", help="what to call it; default: the model")
    logprobs.add_argument("--tokens", type=_whole(2, MOST_TOKENS), default=512, help="of a window")
    logprobs.add_argument("--windows", type=_whole(1, MOST), default=64)
    logprobs.add_argument("--top-k", type=_whole(1, MOST), default=20, help="vLLM's limit: --max-logprobs")
    logprobs.add_argument("--concurrency", type=_whole(1, MOST), default=8)
    logprobs.add_argument(
        "--fingerprint", default="", help="what the endpoint serves; finished windows are kept under it"
    )

    kld = add("kld", answer_commands.kld, "KL divergence of an arm from a reference, from two files of logprobs")
    kld.add_argument("reference", type=_path)
    kld.add_argument("arm", type=_path)
    kld.add_argument("--json", type=_path, metavar="FILE", help="also write every figure as JSON")

    compare = add(
        "compare", answer_commands.compare, "two evaluated folders, anyone's, by a policy; or the arms of one run"
    )
    compare.add_argument("baseline", type=_path, metavar="A", help="a run, RUN/eval/ARM, or an lm-eval output folder")
    compare.add_argument(
        "candidate", type=_path, metavar="B", nargs="?", help="the same; without it, A's arms are paired"
    )
    compare.add_argument("--noise", type=_path, metavar="FOLDER", help="A evaluated again: the noise floor")
    compare.add_argument("--policy", type=_text, default="default", help="a name of conf/gate, or a YAML file")
    compare.add_argument("--json", type=_path, metavar="FILE", help="also write figures and verdict as JSON")
    compare.add_argument("--junit", type=_path, metavar="FILE")
    compare.add_argument(
        "--baseline", dest="baseline_arm", type=_text, metavar="ARM", help="of one run: default source"
    )
    compare.add_argument("--noise-arm", default="", metavar="ARM", help="of one run")

    gate = add("gate", answer_commands.gate, "judge a run folder by a policy; exits 0, 1 or 2")
    gate.add_argument("run", type=_path)
    gate.add_argument("--policy", type=_text, default="smoke", help="a name of conf/gate, or a YAML file")
    gate.add_argument("--gated", action="append", type=_text, default=[], metavar="ARM")
    gate.add_argument("--reported", action="append", type=_text, default=[], metavar="ARM")
    gate.add_argument("--baseline", type=_path, metavar="FILE", help="a committed baseline: judge against it as well")
    gate.add_argument("--update-baseline", action="store_true", help="write --baseline FILE from this run")
    gate.add_argument(
        "--history", type=_path, metavar="FILE", help="add the verdict to it (JSON lines); print the trend"
    )
    gate.add_argument("--json", type=_path, metavar="FILE", help="also write the verdict there")

    report = add("report", commands.report, "render a run's page; several runs side by side; an index of all runs")
    report.add_argument(
        "runs", type=_path, nargs="*", metavar="RUN", help="one: its report.html; several: side by side"
    )
    report.add_argument(
        "--out", type=_path, metavar="PATH", help="one run: a folder, or the page FILE.html; several: comparison.html"
    )
    report.add_argument(
        "--figures",
        type=_path,
        nargs="?",
        const=Path(),
        metavar="DIR",
        help="also every figure as PNG and SVG; default RUN/figures",
    )
    report.add_argument("--index", type=_path, metavar="DIR", help="write DIR/index.html, a list of all runs below it")
    report.add_argument("--serve", action="store_true", help="show it at 127.0.0.1 until Ctrl-C; no RUN: the index")
    report.add_argument("--port", type=_whole(0, 65535), help="of --serve: default 8600; 0: any free one")
    report.add_argument(
        "--open",
        action=argparse.BooleanOptionalAction,
        help="open a browser at it; default: where there is a desktop",
    )

    _add_bench(add("bench", lambda _: 0, "measure the kernels, or what serving costs"))
    return parser


def _add_serving(parser: argparse.ArgumentParser, *, port: int, log: Path) -> None:
    """What to serve, and how."""
    parser.add_argument("path", type=_path)
    parser.add_argument(
        "--backend",
        default="emulation",
        choices=["reference", "emulation", "requant", "stock"],
        help="stock: vLLM's own path, without our plugin",
    )
    parser.add_argument("--format", choices=["nvfp4", "mxfp4"], help="target of requant")
    parser.add_argument("--rule", help="scale rule of requant")
    parser.add_argument("--activations", default="auto", choices=["auto", "none"], help="none: weight-only")
    parser.add_argument(
        "--compat", default="none", choices=["none", "vllm"], help="vllm: scales combined as its own NVFP4 methods do"
    )
    parser.add_argument("--exclude", action="append", type=_text, default=[], metavar="GLOB")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--host", type=_text, default="127.0.0.1")
    parser.add_argument("--port", type=int, default=port)
    parser.add_argument("--max-model-len", type=int, default=commands.DEFAULT_MODEL_LEN, help="0: the model's own")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--name", type=_text, help="the model name it answers to")
    parser.add_argument("--log", type=_path, metavar="FILE", default=log, help="the engine's own output")
    parser.add_argument(
        "--engine-arg",
        action="append",
        type=_pair,
        default=[],
        metavar="KEY=VALUE",
        help="any vLLM flag, verbatim",
    )
    parser.add_argument("--engine-env", action="append", type=_pair, default=[], metavar="KEY=VALUE")


def _add_bench(bench: argparse.ArgumentParser) -> None:
    """Its commands' parsers are of the same class, so that a bad flag ends in 3 there too."""
    what = bench.add_subparsers(required=True, metavar="WHAT")
    kernels = what.add_parser(
        "kernels",
        help="the kernels against the reference, the producers' own code and a copy",
        description="Measure the kernels against the reference, the producers' own code, vLLM's, and a copy.",
    )
    kernels.set_defaults(command=bench_commands.kernels)
    kernels.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    kernels.add_argument("--rows", type=int, help="cpu: default 2048")
    kernels.add_argument("--columns", type=int, help="cpu: default 7168")
    kernels.add_argument("--threads", type=int, help="cpu: default torch's own number")
    kernels.add_argument("--repeats", type=int, help="cpu: default 5")
    kernels.add_argument(
        "--only", action="append", choices=["streams", "linear", "experts"], help="cuda: this table; may be repeated"
    )
    kernels.add_argument("--quick", action="store_true", help="cuda: fewer sizes")
    kernels.add_argument("--json", type=_path, metavar="FILE", help="also write every number as JSON")
    kernels.add_argument("--markdown", type=_path, metavar="FILE", help="cuda: also write the tables as Markdown")
    _add_bench_serve(
        what.add_parser(
            "serve",
            help="load time, memory and latency of one or several arms, and their ratios",
            description="Measure load time, memory and latency of arms on vLLM, through its own benchmark client.",
        )
    )


def _add_bench_serve(serve: argparse.ArgumentParser) -> None:
    serve.set_defaults(command=bench_commands.serve)
    serve.add_argument(
        "--arm",
        action="append",
        type=_pair,
        default=[],
        metavar="NAME=CHECKPOINT[,backend=…,format=…,rule=…,activations=…,url=…]",
        help="the first is the baseline, unless --requant is given",
    )
    serve.add_argument(
        "--requant", type=_text, metavar="CHECKPOINT", help="its requantization at load against the same file to file"
    )
    serve.add_argument("--format", default="mxfp4", choices=["mxfp4", "nvfp4"], help="of --requant")
    serve.add_argument("--rule", help="scale rule of --requant")
    serve.add_argument(
        "--exclude", action="append", type=_text, default=[], metavar="GLOB", help="of --requant: stays as it is"
    )
    serve.add_argument("--preset", default="small", choices=["small", "published", "requant"])
    serve.add_argument("--input", type=_whole(1, MOST_TOKENS), metavar="TOKENS", help="a load of one's own, all four:")
    serve.add_argument("--output", type=_whole(1, MOST_TOKENS), metavar="TOKENS")
    serve.add_argument("--concurrency", type=_whole(1, MOST))
    serve.add_argument("--prompts", type=_whole(1, MOST))
    serve.add_argument("--repeat", type=_whole(1, MOST), default=10, help="after one warm-up, which is dropped")
    serve.add_argument("--margin", type=float, default=0.01, help="of equivalence, as a proportion")
    serve.add_argument("--one-at-a-time", action="store_true", help="where memory holds one server: start each anew")
    serve.add_argument("--tokenizer", type=_path, help="default: the first arm's checkpoint")
    serve.add_argument("--compiled", action="store_true", help="torch.compile and CUDA graphs")
    serve.add_argument("--max-model-len", type=_whole(0, MOST_TOKENS), default=0, help="0: what the load needs")
    serve.add_argument("--dtype", default="bfloat16")
    serve.add_argument("--tensor-parallel-size", type=_whole(1, MOST), default=1)
    serve.add_argument("--engine-arg", action="append", type=_pair, default=[], metavar="KEY=VALUE")
    serve.add_argument("--engine-env", action="append", type=_pair, default=[], metavar="KEY=VALUE")
    serve.add_argument("--out", type=_path, required=True, metavar="FOLDER", help="serving_cost.json; a run's, too")


def _add_text(parser: argparse.ArgumentParser, *, tokens: int, windows: int) -> None:
    """The text that a model is run on."""
    parser.add_argument("--text", type=_path, metavar="FILE", help="default: the mini tasks' training prompts")
    parser.add_argument("--tokens", type=_whole(2, MOST_TOKENS), default=tokens, help="of a window")
    parser.add_argument("--windows", type=_whole(1, MOST), default=windows)
    parser.add_argument("--skip", type=_whole(0, MOST), default=0, metavar="N", help="leave out the first N windows")


def _add_capture(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts", type=_path, metavar="FILE", help="a prompt a line; default: the mini tasks' training prompts"
    )
    parser.add_argument("--max-model-len", type=_whole(1, MOST_TOKENS), default=commands.DEFAULT_MODEL_LEN)


if __name__ == "__main__":
    sys.exit(main())
