"""The `workbench` command: one stage at a time, on plain paths.

    workbench lint PATH
    workbench quantize SRC DST --format nvfp4 --dialect modelopt --exclude '*self_attn*' --calibrate
    workbench quantize SRC DST --recipe kimi_k2_6_nvfp4 --dialect modelopt --jobs 2 --resume
    workbench serve PATH --backend emulation
    workbench analyze SOURCE FIRST --second mxfp4
    workbench evaluate URL --model NAME --tokenizer PATH --task gsm8k_mini --out FOLDER
    workbench report RUN
    workbench bench kernels --device cpu

Exit codes: 0 done (or clean, or pass), 1 lint findings or a regression, 2 inconclusive or invalid, 3 could not run:
also for a bad flag. Imports that take time stand inside the commands.
"""

from __future__ import annotations

import argparse
import errno
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import workbench
from workbench.errors import ConfigError, WorkbenchError
from workbench.interrupt import Interrupted, terminable

COULD_NOT_RUN = 3
MOST_BLOCK = 1 << 30
SHOWN_NAMES = 3  # of a lint finding's tensors; --json has all


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
    try:
        arguments = _parser().parse_args(argv)
        command: Callable[[argparse.Namespace], int] = arguments.command
        with terminable():
            return command(arguments)
    except SystemExit as stop:  # argparse: --help, --version, or a bad flag
        return stop.code if isinstance(stop.code, int) else 0
    except WorkbenchError as error:
        print(f"error: {error}", file=sys.stderr)
    except BrokenPipeError:
        sys.stderr.close()
    except (KeyboardInterrupt, Interrupted):
        print("interrupted", file=sys.stderr)
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:  # stdout's disk
            print("error: the output could not be printed: its disk is full\n  fix: free space", file=sys.stderr)
            return COULD_NOT_RUN
        traceback.print_exc()
        print("this is a bug in the workbench; the traceback above says where", file=sys.stderr)
    return COULD_NOT_RUN


# ---- commands --------------------------------------------------------------------------------------------------------


def _lint(arguments: argparse.Namespace) -> int:
    from workbench import records
    from workbench.checkpoints.lint import lint_checkpoint

    if arguments.json and arguments.json.resolve().is_relative_to(Path(arguments.path).resolve()):
        raise ConfigError(f"--json {arguments.json} lies within the checkpoint", fix="write the findings elsewhere")
    report = lint_checkpoint(
        arguments.path,
        allow=tuple(arguments.allow),
        all_scales=arguments.all_scales,
        tensor_parallel=tuple(arguments.tensor_parallel),
    )
    if arguments.json:
        records.write_json(arguments.json, report)
    print(
        f"{report.checkpoint}: {report.dialect}, {report.tensors} tensors, {report.quantized_tensors} quantized, "
        f"{len(report.checks)} checks in {report.seconds:.1f} s"
    )
    if report.scale_bytes_read < report.scale_bytes:
        print(
            f"every global and input scale was read, and {report.scale_bytes_read / 1e9:.2f} of"
            f" {report.scale_bytes / 1e9:.2f} GB of block scales: a fault of single blocks may lie in the rest"
            " (--all-scales)"
        )
    for finding in report.findings:
        place = " ".join(part for part in (finding.tensor, finding.file) if part)
        print(f"{finding.severity}: {finding.check}: {place}: {finding.message}")
        others = [name for name in finding.tensors if name != finding.tensor]
        if others:
            print(f"  also: {', '.join(others[:SHOWN_NAMES])}{', ...' if others[SHOWN_NAMES:] else ''}")
        if finding.fix:
            print(f"  fix: {finding.fix}")
    if not report.findings:
        print("clean")
    if str(arguments.path).startswith("hf:"):
        from workbench.checkpoints.hub import TRAFFIC

        print(TRAFFIC)
    return 1 if report.errors else 0


def _quantize(arguments: argparse.Namespace) -> int:
    from workbench.checkpoints.convert import check_request, quantize_checkpoint
    from workbench.checkpoints.recipe import read_recipe
    from workbench.progress import Progress

    if arguments.prompts and not arguments.calibrate:
        raise ConfigError("--prompts is for --calibrate, which is not given", fix="add --calibrate, or drop --prompts")
    recipe = read_recipe(arguments.recipe) if arguments.recipe else None
    shared_globals = not arguments.no_shared_globals
    check_request(  # before a calibration starts
        arguments.format, arguments.dialect, arguments.rule, recipe, shared_globals=shared_globals
    )
    amax = None
    if arguments.calibrate or arguments.activations:
        from workbench.formats.activations import read_activations

        amax = read_activations(arguments.activations or _capture(arguments)).input_amax()
    result = quantize_checkpoint(
        arguments.source,
        arguments.destination,
        format=arguments.format,
        dialect=arguments.dialect,
        exclude=tuple(arguments.exclude),
        include=tuple(arguments.include),
        rule=arguments.rule,
        block=arguments.block,
        recipe=recipe,
        weight_only=arguments.weight_only,
        shared_globals=shared_globals,
        input_amax=amax,
        progress=Progress().counter("tensors"),
        overwrite=arguments.overwrite,
        resume=arguments.resume,
        jobs=arguments.jobs,
    )
    for warning in result.warnings:
        print(f"warning: {warning}")
    counts = {
        "quantized": result.quantized,
        "copied": result.copied,
        "decoded": result.decoded,
        "kept": result.kept,
    }
    print(
        f"wrote {result.path}: {', '.join(f'{len(names)} {what}' for what, names in counts.items() if names)}, "
        f"{result.source_bytes / 1e6:.1f} MB -> {result.written_bytes / 1e6:.1f} MB (error and recipe: README.md)"
    )
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    print(f"wrote {_capture(arguments, arguments.out)}")
    return 0


def _capture(arguments: argparse.Namespace, out: Path | None = None) -> Path:
    """Record layer inputs of a checkpoint on the prompts file (a prompt a line) or on the shipped training prompts."""
    import tempfile

    from workbench.checkpoints.open import resolve_path
    from workbench.evaluation.prompts import training_prompts
    from workbench.serving.capture import capture_activations
    from workbench.serving.spec import EngineSpec, ServeSpec

    if arguments.prompts:
        text = _read_text(arguments.prompts)
        prompts = [line for line in text.splitlines() if line.strip()]
        if not prompts:
            raise ConfigError(f"{arguments.prompts} holds no prompt", fix="one prompt a line")
    else:
        with tempfile.TemporaryDirectory() as scratch:
            tasks = _tasks(["gsm8k_mini", "mmlu_pro_mini"])
            prompts = training_prompts(tasks, 24, scratch=Path(scratch))
    target = out or Path(tempfile.mkdtemp(prefix="workbench-")) / "activations.safetensors"
    spec = ServeSpec(
        arm="calibration",
        checkpoint=resolve_path(arguments.source),
        backend="reference",
        engine=EngineSpec(max_model_len=arguments.max_model_len),
    )
    capture_activations(spec, prompts, target)
    return target


def _serve(arguments: argparse.Namespace) -> int:
    from workbench.serving.serve import serve_forever
    from workbench.serving.spec import EngineSpec, ServeSpec

    spec = ServeSpec(
        arm=arguments.name or Path(arguments.path).name,
        checkpoint=Path(arguments.path),
        backend=arguments.backend,
        format=arguments.format,
        rule=arguments.rule,
        activations=arguments.activations,
        exclude=tuple(arguments.exclude),
        kv_cache_dtype=arguments.kv_cache_dtype,
        engine=EngineSpec(
            host=arguments.host,
            port=arguments.port,
            max_model_len=arguments.max_model_len,
            dtype=arguments.dtype,
            tensor_parallel_size=arguments.tensor_parallel_size,
            args=dict(_pair(item) for item in arguments.engine_arg),
            env=dict(_pair(item) for item in arguments.engine_env),
        ),
    )
    serve_forever(spec, Path(arguments.log))
    return 0


def _analyze(arguments: argparse.Namespace) -> int:
    from workbench.analysis.study import analyze_pairs
    from workbench.progress import Progress
    from workbench.settings import FormatSettings, PairSettings

    target = arguments.second in ("nvfp4", "mxfp4")
    if arguments.rule and not target:
        raise ConfigError("--rule belongs to a second format, not to a stored checkpoint", fix="drop --rule")
    second: tuple[Path, FormatSettings | None, str] = (Path(arguments.second), None, "auto")
    if target:
        second = (arguments.first, FormatSettings(name=arguments.second, rule=arguments.rule), "auto")
    analyze_pairs(
        out=arguments.out,
        source_arm="source",
        pairs=(PairSettings(first="first", second="second"),),
        arms={"source": (arguments.source, None, "none"), "first": (arguments.first, None, "auto"), "second": second},
        activations=arguments.activations,
        bootstrap=arguments.bootstrap,
        progress=Progress().bar,
    )
    print(f"wrote tensors.parquet, gemm.parquet and analysis.json in {arguments.out}")
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    from workbench import records
    from workbench.evaluation.run import evaluate
    from workbench.progress import Progress
    from workbench.settings import check_name

    check_name("--arm", arguments.arm)
    say = Progress()
    out = arguments.out / "eval" / arguments.arm
    result = evaluate(
        arm=arguments.arm,
        base_url=arguments.url,
        model=arguments.model,
        tokenizer=arguments.tokenizer,
        tasks=_tasks(arguments.task, limit=arguments.limit, num_fewshot=arguments.num_fewshot),
        out_dir=out,
        concurrency=arguments.concurrency,
        request_order="forward",
        max_length=arguments.max_length,
        seed=0,
        progress=say.counter("answers"),
    )
    records.write_json(out / "scores.json", result)
    say.scores(result)
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from workbench import records
    from workbench.comparison import compare_arms

    if not arguments.run.is_dir():
        raise ConfigError(f"there is no folder {arguments.run}", fix="give the folder that a run printed")
    arms = sorted(path.parent.name for path in (arguments.run / "eval").glob("*/scores.json"))
    if arguments.baseline not in arms:
        raise ConfigError(
            f"{arguments.run}/eval has no evaluated arm {arguments.baseline!r}",
            fix=f"evaluated arms: {', '.join(arms)}" if arms else "run `workbench evaluate … --out` into it first",
        )
    comparison = compare_arms(
        arguments.run,
        baseline=arguments.baseline,
        candidates=[arm for arm in arms if arm != arguments.baseline],
        noise_arm=arguments.noise_arm,
    )
    records.write_json(arguments.run / "comparison.json", comparison)
    for row in comparison.tasks:
        print(
            f"{row.candidate} {row.task} {row.filter}: loss {row.loss_pp:+.2f} pp "
            f"({row.loss_low_pp:+.2f} to {row.loss_high_pp:+.2f}), lost {row.lost}, gained {row.gained}, n {row.n}"
        )
    return 0


def _gate(arguments: argparse.Namespace) -> int:
    from workbench.experiment import judge

    policy = _policy(arguments.policy)
    for key in ("gated", "reported"):
        if getattr(arguments, key):
            policy[key] = getattr(arguments, key)
    found = (*(arguments.run / "lint").glob("*.json"), *(f.parent for f in arguments.run.glob("eval/*/scores.json")))
    arms = sorted({path.stem if path.suffix == ".json" else path.name for path in found})
    named = [*arguments.gated, *arguments.reported]
    if arms and not set(named) <= set(arms):
        raise ConfigError(
            f"{arguments.run} has no arm {next(n for n in named if n not in arms)!r}", fix=f"arms: {', '.join(arms)}"
        )
    verdict = judge(arguments.run, policy)
    print(f"verdict: {verdict.status.upper()} (exit code {verdict.exit_code})\n{verdict.headline}")
    for check in verdict.checks:
        print(f"  {check.status}: {check.name}: {check.reason}")
    return verdict.exit_code


def _report(arguments: argparse.Namespace) -> int:
    from workbench.reporting import build_report

    print(build_report(arguments.run))
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    import torch

    from workbench import bench, records

    result = bench.bench_kernels(
        rows=arguments.rows,
        columns=arguments.columns,
        threads=arguments.threads or torch.get_num_threads(),
        repeats=arguments.repeats,
    )
    if arguments.json:
        records.write_json(arguments.json, result)
    print(bench.table(result))
    return 0


# ---- arguments -------------------------------------------------------------------------------------------------------


def _tasks(names: list[str], **changes: Any) -> tuple[Any, ...]:
    """Tasks of conf/eval by name (or KEY=VALUE overrides of them), with what is not None changed."""
    from omegaconf import OmegaConf

    from workbench.evaluation.spec import task_spec
    from workbench.settings import compose

    composed = OmegaConf.to_container(compose([f"eval=[{','.join(names)}]"]).eval, resolve=True)
    assert isinstance(composed, dict)
    wanted = {key: value for key, value in changes.items() if value is not None}
    return tuple(task_spec({"name": name, **task, **wanted}) for name, task in composed.items())


def _policy(name: str) -> dict[str, Any]:
    """A policy of conf/gate by name, or a YAML file."""
    from omegaconf import OmegaConf

    from workbench.settings import policy_file

    path = policy_file(name)
    fix = "write it like conf/gate/smoke.yaml"
    try:
        policy = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except Exception as error:  # YAML's and OmegaConf's errors share no base
        raise ConfigError(f"the policy {path} cannot be read: {error}", fix=fix) from error
    if not isinstance(policy, dict):
        raise ConfigError(f"the policy {path} is not a mapping of settings", fix=fix)
    return {str(key): value for key, value in policy.items()}


def _pair(item: str) -> tuple[str, str]:
    key, sign, value = item.partition("=")
    if not sign:
        raise ConfigError(f"{item!r} is not KEY=VALUE", fix="e.g. --engine-arg max_num_seqs=64")
    return key, value


def _written_formats() -> str:
    """Dialects, the formats that each writes, and their scale rules, from the tables."""
    from workbench.checkpoints.dialects import DIALECTS
    from workbench.formats import FORMATS

    lines = ["dialect, format (scale rules):"]
    for dialect in DIALECTS.values():
        for name in dialect.writes:
            rules = ", ".join(rule.value for rule in FORMATS[name].rules) if name in FORMATS else "decodes"
            lines.append(f"  {dialect.name:20} {name} ({rules})")
    return "\n".join(lines)


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _block(text: str) -> tuple[int, int]:
    """`128x128` as (rows, columns)."""
    rows, _, columns = text.partition("x")
    if not (rows.isdecimal() and columns.isdecimal() and int(rows) > 0 and int(columns) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWSxCOLUMNS")
    if max(int(rows), int(columns)) > MOST_BLOCK:
        raise argparse.ArgumentTypeError(f"{text!r}: a block has at most {MOST_BLOCK} rows and columns")
    return int(rows), int(columns)


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", fix="give an existing UTF-8 text file") from error


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="workbench", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--version", action="version", version=f"workbench {workbench.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, function: Callable[[argparse.Namespace], int], help: str) -> _Parser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(command=function)
        return sub

    lint = add("lint", _lint, "check a checkpoint's bytes against its own claims")
    lint.add_argument("path", type=Path)
    lint.add_argument("--allow", action="append", default=[], metavar="CHECK", help="show, but do not fail on, a check")
    lint.add_argument("--json", type=Path, metavar="FILE", help="also write the findings as JSON, with all names")
    lint.add_argument("--all-scales", action="store_true", help="read block scales beyond 1 GiB whole, not in samples")
    lint.add_argument(
        "--tensor-parallel",
        action="append",
        type=int,
        default=[],
        metavar="N",
        help="a size it is to be served with: what does not split is an error",
    )

    quantize = add("quantize", _quantize, "convert a checkpoint, shard by shard")
    quantize.formatter_class = argparse.RawDescriptionHelpFormatter
    quantize.epilog_of = _written_formats
    quantize.add_argument("source", help="a folder, or hf://org/name")
    quantize.add_argument("destination", type=Path)
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
    quantize.add_argument("--recipe", metavar="NAME", help="rules by module: a name of conf/recipe, or a YAML file")
    quantize.add_argument("--weight-only", action="store_true", help="activations stay unquantized")
    quantize.add_argument("--no-shared-globals", action="store_true", help="a global scale per matrix")
    quantize.add_argument("--calibrate", action="store_true", help="run the source under vLLM and write input_scale")
    quantize.add_argument("--activations", type=Path, metavar="FILE", help="calibrate from a captured file instead")
    quantize.add_argument("--jobs", type=int, default=1, metavar="N", help="tensors converted at once, in threads")
    quantize.add_argument(
        "--resume", action="store_true", help="go on where the same conversion was killed; keep what is done if stopped"
    )
    quantize.add_argument("--overwrite", action="store_true", help="replace an existing destination")
    _add_capture(quantize)

    calibrate = add("calibrate", _calibrate, "record every layer's real inputs (amax and a sample) under vLLM")
    calibrate.add_argument("source")
    calibrate.add_argument("--out", type=Path, required=True, metavar="FILE")
    _add_capture(calibrate)

    analyze = add("analyze", _analyze, "weight error and matrix-product noise of one or two quantizations")
    analyze.add_argument("source", type=Path, help="the producer's original")
    analyze.add_argument("first", type=Path, help="the quantized checkpoint")
    analyze.add_argument("--second", default="mxfp4", help="format to requantize to, or a checkpoint's folder")
    analyze.add_argument("--rule", help="scale rule of the second quantization")
    analyze.add_argument("--activations", type=Path, metavar="FILE", help="a file that `workbench calibrate` wrote")
    analyze.add_argument("--bootstrap", type=int, default=200)
    analyze.add_argument("--out", type=Path, required=True, metavar="FOLDER")

    serve = add("serve", _serve, "serve a checkpoint through a backend on vLLM until Ctrl-C")
    serve.add_argument("path", type=Path)
    serve.add_argument("--backend", default="emulation", choices=["reference", "emulation", "requant"])
    serve.add_argument("--format", choices=["nvfp4", "mxfp4"], help="target of requant")
    serve.add_argument("--rule", help="scale rule of requant")
    serve.add_argument("--activations", default="auto", choices=["auto", "none"], help="none: weight-only")
    serve.add_argument("--exclude", action="append", default=[], metavar="GLOB")
    serve.add_argument("--kv-cache-dtype", default="auto")
    serve.add_argument("--dtype", default="bfloat16")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument("--max-model-len", type=int, default=2048)
    serve.add_argument("--tensor-parallel-size", type=int, default=1)
    serve.add_argument("--name", help="the model name it answers to")
    serve.add_argument("--log", metavar="FILE", default="workbench-serve.log", help="the engine's own output")
    serve.add_argument("--engine-arg", action="append", default=[], metavar="KEY=VALUE", help="any vLLM flag, verbatim")
    serve.add_argument("--engine-env", action="append", default=[], metavar="KEY=VALUE")

    evaluate = add("evaluate", _evaluate, "run lm-eval tasks against an OpenAI-compatible endpoint")
    evaluate.add_argument("url", help="base URL, ending in /v1")
    evaluate.add_argument("--model", required=True, help="the model name that the endpoint answers to")
    evaluate.add_argument("--tokenizer", type=Path, required=True)
    evaluate.add_argument("--task", action="append", required=True)
    evaluate.add_argument("--limit", type=int)
    evaluate.add_argument("--num-fewshot", type=int)
    evaluate.add_argument("--arm", default="arm")
    evaluate.add_argument("--concurrency", type=int, default=16)
    evaluate.add_argument("--max-length", type=int, default=2048)
    evaluate.add_argument("--out", type=Path, required=True, metavar="RUN")

    compare = add("compare", _compare, "pair the evaluated arms of a run folder with a baseline")
    compare.add_argument("run", type=Path)
    compare.add_argument("--baseline", default="source")
    compare.add_argument("--noise-arm", default="")

    gate = add("gate", _gate, "judge a run folder by a policy; exits 0, 1 or 2")
    gate.add_argument("run", type=Path)
    gate.add_argument("--policy", default="smoke", help="a name of conf/gate, or a YAML file")
    gate.add_argument("--gated", action="append", default=[], metavar="ARM")
    gate.add_argument("--reported", action="append", default=[], metavar="ARM")

    report = add("report", _report, "render report.html and summary.md of a run folder")
    report.add_argument("run", type=Path)

    bench = add("bench", _bench, "measure the kernels against the reference and the producers' own code")
    bench.add_argument("what", choices=["kernels"])
    bench.add_argument("--device", default="cpu", choices=["cpu"])
    bench.add_argument("--rows", type=int, default=2048)
    bench.add_argument("--columns", type=int, default=7168)
    bench.add_argument("--threads", type=int, help="default: torch's own number")
    bench.add_argument("--repeats", type=int, default=5)
    bench.add_argument("--json", type=Path, metavar="FILE", help="also write every number as JSON")
    return parser


def _add_capture(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="a prompt a line; default: the mini tasks' training prompts"
    )
    parser.add_argument("--max-model-len", type=_positive, default=2048)


if __name__ == "__main__":
    sys.exit(main())
