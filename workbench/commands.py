"""What each `workbench` command does with its parsed arguments; returns the exit code.

    code = commands.lint(arguments)

Every command checks where it is to write before it works. Imports that take time stand inside the commands.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import ConfigError, OutputError

if TYPE_CHECKING:
    from workbench.serving.spec import ServeSpec

DEFAULT_MODEL_LEN = 2048  # tokens, where the model holds as many
SHOWN_NAMES = 3  # of a lint finding's tensors; --json has all


def lint(arguments: argparse.Namespace) -> int:
    from workbench import records
    from workbench.checkpoints.lint import lint_checkpoint

    if arguments.json:
        check_file("--json", arguments.json, arguments.path)
    report = lint_checkpoint(
        arguments.path,
        allow=tuple(arguments.allow),
        all_scales=arguments.all_scales,
        all_values=arguments.all_values,
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
    if report.value_bytes_read < report.value_bytes:
        print(
            f"{report.value_bytes_read / 1e9:.2f} of {report.value_bytes / 1e9:.2f} GB of plain weights and FP8 codes"
            " were read: a NaN may lie in the rest (--all-values)"
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


def quantize(arguments: argparse.Namespace) -> int:
    from workbench.checkpoints.convert import check_request, quantize_checkpoint
    from workbench.checkpoints.recipe import read_recipe
    from workbench.progress import Progress

    if arguments.prompts and not arguments.calibrate:
        raise ConfigError("--prompts is for --calibrate, which is not given", fix="add --calibrate, or drop --prompts")
    check_input("--activations", arguments.activations)
    recipe = read_recipe(arguments.recipe) if arguments.recipe else None
    shared_globals = not arguments.no_shared_globals
    check_request(  # before a calibration starts
        arguments.format,
        arguments.dialect,
        arguments.rule,
        recipe,
        shared_globals=shared_globals,
        block=arguments.block,
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
        calibration=_calibration(arguments),
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


def _calibration(arguments: argparse.Namespace) -> list[str]:
    """The words of `quantize` that measure the input scales again; files by their names, as the card has the source."""
    if arguments.activations:
        return ["--activations", arguments.activations.name]
    words = ["--calibrate", "--max-model-len", str(arguments.max_model_len)]
    return words + (["--prompts", arguments.prompts.name] if arguments.prompts else [])


def calibrate(arguments: argparse.Namespace) -> int:
    from workbench.formats.activations import read_activations

    check_file("--out", arguments.out, arguments.source)
    out = _capture(
        arguments,
        arguments.out,
        reservoir_rows=arguments.rows,
        second_moments=arguments.second_moments,
        second_moments_bytes=arguments.second_moments_mb << 20,
    )
    print(f"wrote {out}")
    notes = read_activations(out).metadata
    if cut := int(notes.get("second_moments_diagonal_only", "0")):
        print(f"{cut} inputs keep the diagonal of their second moment only: --second-moments-mb is spent")
    return 0


def serve(arguments: argparse.Namespace) -> int:
    from workbench.serving.serve import serve_forever

    check_file("--log", arguments.log, arguments.path)
    if arguments.numerics:
        check_file("--numerics", arguments.numerics, arguments.path)
    serve_forever(_serve_spec(arguments, numerics=bool(arguments.numerics)), arguments.log, numerics=arguments.numerics)
    return 0


def numerics(arguments: argparse.Namespace) -> int:
    """0: every layer runs as asked; 1: some do not. Raises EngineError where no card could be taken."""
    from workbench import records
    from workbench.errors import EngineError
    from workbench.serving.numerics import table
    from workbench.serving.serve import take_card

    check_file("--log", arguments.log, arguments.path)
    if arguments.json:
        check_file("--json", arguments.json, arguments.path)
    card = take_card(_serve_spec(arguments, numerics=True), arguments.log)
    if card.error:
        raise EngineError(f"no numerics card: {card.error}", fix=f"read the log, {arguments.log}")
    if arguments.json:
        records.write_json(arguments.json, card)
    print(table(card))
    return 0 if card.as_asked else 1


def _serve_spec(arguments: argparse.Namespace, *, numerics: bool) -> ServeSpec:
    from workbench.serving.spec import EngineSpec, ServeSpec

    return ServeSpec(
        arm=arguments.name or arguments.path.resolve().name,
        checkpoint=arguments.path,
        backend=arguments.backend,
        format=arguments.format,
        rule=arguments.rule,
        activations=arguments.activations,
        compat=arguments.compat,
        exclude=tuple(arguments.exclude),
        kv_cache_dtype=arguments.kv_cache_dtype,
        engine=EngineSpec(
            host=arguments.host,
            port=arguments.port,
            max_model_len=_fitting_context(arguments, arguments.path),
            dtype=arguments.dtype,
            tensor_parallel_size=arguments.tensor_parallel_size,
            args=dict(arguments.engine_arg),
            env=dict(arguments.engine_env),
            numerics=numerics,
        ),
    )


def report(arguments: argparse.Namespace) -> int:
    """One run's page, several runs' comparison, an index, figures; then served, where asked for."""
    from workbench.reporting import build_report

    runs, served = arguments.runs, arguments.serve
    if arguments.figures is not None and len(runs) != 1:
        raise ConfigError("--figures draws one run", fix="name it first: workbench report RUN --figures [DIR]")
    if not runs and not arguments.index and not served:
        raise ConfigError("there is nothing to report", fix="give a run folder, --index DIR, or --serve")
    if arguments.index and runs:
        raise ConfigError("--index lists a folder, and RUN is given too", fix="drop one of them")
    if arguments.out and (not runs or (served and len(runs) == 1)):
        other = "--serve shows the run's own pages" if runs else "--out is of a run's page, or of several runs'"
        raise ConfigError(other, fix="drop --out" if runs else "name a run, or drop --out")
    for flag, value in (("--port", arguments.port), ("--open", arguments.open)):
        if value is not None and not served:
            raise ConfigError(f"{flag} is of --serve, which is not given", fix=f"add --serve, or drop {flag}")
    figures, folder = arguments.figures, runs[0] if runs else Path()
    if arguments.out and len(runs) == 1:
        folder = arguments.out.parent if arguments.out.suffix == ".html" else arguments.out
        check_folder("--out", folder)
    if figures is not None:
        figures = figures if figures.parts else folder / "figures"
        check_folder("--figures", figures)
    if len(runs) == 1:
        print(build_report(runs[0], arguments.out, strict=not served))
    elif runs and (arguments.out or not served):
        from workbench.reporting.side_by_side import build_comparison

        out = arguments.out or Path("comparison.html")
        check_file("--out", out, *runs)
        print(build_comparison(runs, out))
    elif arguments.index:
        from workbench.reporting.index import build_index

        print(build_index(arguments.index))
    if figures is not None:
        from workbench.reporting.export import write_figures

        print(write_figures(runs[0], figures)[-1])
    if served:
        from workbench.reporting import server

        lookup = server.pages_of_runs(runs) if runs else server.pages_of_folder(arguments.index or Path("reports"))
        port = 8600 if arguments.port is None else arguments.port
        server.serve(lookup, port, open_browser=_wants_browser(arguments.open))
    return 0


def _wants_browser(asked: bool | None) -> bool:
    """Without a word for or against it: on a desktop, where a browser does not take over the terminal."""
    desktop = sys.platform in ("darwin", "win32") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ))
    return asked if asked is not None else desktop and sys.stdout.isatty()


def written_formats() -> str:
    """Dialects, the formats that each writes, and their scale rules, from the tables."""
    from workbench.checkpoints.dialects import DIALECTS
    from workbench.formats import FORMATS

    lines = ["dialect, format (scale rules):"]
    for dialect in DIALECTS.values():
        for name in dialect.writes:
            rules = ", ".join(rule.value for rule in FORMATS[name].rules) if name in FORMATS else "decodes"
            lines.append(f"  {dialect.name:20} {name} ({rules})")
    return "\n".join(lines)


# ---- what they share -------------------------------------------------------------------------------------------------


def _capture(arguments: argparse.Namespace, out: Path | None = None, **settings: Any) -> Path:
    """Record layer inputs of a checkpoint on the prompts file (a prompt a line) or on the shipped training prompts.

    settings: `capture_activations`'s; by default no second moments, which a calibration of scales does not need.
    """
    import tempfile

    from workbench.checkpoints import open_checkpoint
    from workbench.checkpoints.open import resolve_path
    from workbench.evaluation.prompts import training_prompts
    from workbench.serving.capture import capture_activations
    from workbench.serving.spec import EngineSpec, ServeSpec

    with open_checkpoint(arguments.source):  # before an engine starts
        pass
    if arguments.prompts:
        text = read_text(arguments.prompts)
        prompts = [line for line in text.splitlines() if line.strip()]
        if not prompts:
            raise ConfigError(f"{arguments.prompts} holds no prompt", fix="one prompt a line")
    else:
        with tempfile.TemporaryDirectory() as scratch:
            tasks = tasks_named(["gsm8k_mini", "mmlu_pro_mini"])
            prompts = training_prompts(tasks, 24, scratch=Path(scratch))
    target = out or Path(tempfile.mkdtemp(prefix="workbench-")) / "activations.safetensors"
    spec = ServeSpec(
        arm="calibration",
        checkpoint=resolve_path(arguments.source),
        backend="reference",
        engine=EngineSpec(max_model_len=_fitting_context(arguments, resolve_path(arguments.source))),
    )
    capture_activations(spec, prompts, target, **({"second_moments": "none"} | settings))
    return target


def _fitting_context(arguments: argparse.Namespace, checkpoint: Path) -> int:
    from workbench.checkpoints.context import fit_context

    asked = int(arguments.max_model_len)
    return fit_context(asked, [checkpoint], default=DEFAULT_MODEL_LEN, key="--max-model-len {}")


def tasks_named(names: list[str], **changes: Any) -> tuple[Any, ...]:
    """Tasks of conf/eval by name, with what is not None changed. Raises ConfigError naming the choices."""
    from omegaconf import OmegaConf

    from workbench.composition import compose, group_choices
    from workbench.evaluation.spec import task_spec

    choices = group_choices("eval")
    for name in names:
        if name not in choices:
            raise ConfigError(f"there is no task {name!r}", fix=f"choose among {', '.join(choices)}")
    composed = compose([f"eval=[{','.join(names)}]"]).eval
    missing = sorted(OmegaConf.missing_keys(composed))
    if missing:
        raise ConfigError(
            f"--task {','.join(names)} needs {', '.join(missing)}, which is no flag here",
            fix=f"run it as an experiment: python -m workbench.run … eval=[{','.join(names)}] {missing[0]}=FILE",
        )
    tasks = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(tasks, dict)
    wanted = {key: value for key, value in changes.items() if value is not None}
    return tuple(task_spec({"name": name, **task, **wanted}) for name, task in tasks.items())


def read_text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", fix="give an existing UTF-8 text file") from error


def check_input(flag: str, path: Path | None) -> None:
    """Refuse a file that is not there. Raises ConfigError."""
    if path is not None and not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"{flag} {path} {what}", fix="give the file that `workbench calibrate` wrote")


def check_file(flag: str, path: Path, *inputs: Path | str | None) -> None:
    """Refuse a file that cannot be written, or that is part of an input, before the work that leads to it.

    inputs: files, folders or hf:// references that the command reads; None is skipped. Raises OutputError.
    """
    if path.is_dir():
        raise OutputError(f"{flag} {path} is a folder", fix="give the file's own name within it")
    _check_apart(flag, path, inputs)
    check_folder(flag, path.parent)


def check_folder(flag: str, path: Path, *inputs: Path | str | None) -> None:
    """Refuse a folder that cannot be made or written into, or that lies in an input. Raises OutputError."""
    present = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
    if not present.is_dir():
        raise OutputError(f"{flag} {path}: {present} is no folder", fix="choose another path")
    if not os.access(present, os.W_OK | os.X_OK):
        raise OutputError(f"{flag} {path}: {present} may not be written", fix="choose another path")
    _check_apart(flag, path, inputs)


def _check_apart(flag: str, path: Path, inputs: tuple[Path | str | None, ...]) -> None:
    for given in inputs:
        if given is not None and os.path.exists(given) and path.resolve().is_relative_to(Path(given).resolve()):
            where = "is" if path.resolve() == Path(given).resolve() else "lies within"
            raise OutputError(f"{flag} {path} {where} {given}, which the command reads", fix="write elsewhere")
