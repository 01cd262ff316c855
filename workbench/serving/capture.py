"""Record what the layers of a model really receive, inside vLLM, for analysis and calibration.

    capture_activations(spec, prompts, Path("activations.safetensors"))

vLLM runs in a child process on the decoded model with exact activations (backend reference); every linear layer that a
quantizer would consider is tapped at its input, every expert at the tokens routed to it, and its down projection at the
true intermediate. The file's layout is `workbench.formats.activations`'s. Only prompt tokens are recorded: each prompt
is prefilled once, without prefix caching or chunking. Trade-off: experts run in a loop of our own (vLLM's fused kernel
shows no intermediates), which differs from it by rounding only. Beside the sampled rows the file holds each input's
second moment over all rows, from which output noise follows without a model (`analyze --products moments`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.errors import ConfigError, EngineError

from . import command as commands
from .spec import EngineSpec, ServeSpec

SECOND_MOMENTS = ("none", "diagonal", "full")
SECOND_MOMENTS_BYTES = 1 << 30
"""Whole second moments take at most so much of a file by default."""
_LOG_LINES = 20


def capture_activations(
    spec: ServeSpec,
    prompts: Sequence[str] | Sequence[list[int]],
    out: Path,
    *,
    reservoir_rows: int = 256,
    max_tokens: int = 1,
    second_moments: str = "none",
    second_moments_bytes: int = SECOND_MOMENTS_BYTES,
    log: Path | None = None,
) -> None:
    """Run `prompts` (texts, or lists of token ids) through `spec`'s checkpoint and write the activations file `out`.

    reservoir_rows: rows kept for a module, drawn uniformly from all it saw; amax and counts cover all rows.
    max_tokens: 0 or 1 records the prompts alone; more also records the tokens generated greedily, but the last.
    second_moments: "none", "diagonal" or "full", over all rows that a module saw (an expert: its own). A full one is
    4 K^2 bytes in the file and twice that in the engine's memory; those that do not fit in `second_moments_bytes`
    together keep their diagonal, and the file's metadata says how many.
    `spec.backend`, `format` and `activations` are ignored: capture runs the decoded weights with exact activations.
    Raises ConfigError without prompts, for another word as `second_moments` or for a tensor parallel size other than 1,
    CheckpointError for the checkpoint, EngineError with the end of the log when vLLM fails, OutputError when `out`
    cannot be written.
    """
    if not prompts:
        raise ConfigError("no prompts to capture activations with", fix="give at least one text")
    if second_moments not in SECOND_MOMENTS:
        raise ConfigError(f"second moments {second_moments!r}", fix=f"choose one of: {', '.join(SECOND_MOMENTS)}")
    if spec.engine.tensor_parallel_size != 1 or spec.engine.kind != "vllm":
        raise ConfigError(
            "activations are captured inside one vLLM process",
            fix="use engine.kind=vllm and engine.tensor_parallel_size=1 for the capture",
        )
    plain = dataclasses.replace(
        spec, backend="reference", format=None, rule=None, activations="auto", compat="none", exclude=()
    )
    with tempfile.TemporaryDirectory(prefix="workbench-capture-") as folder:
        job = Path(folder) / "job.json"
        result = Path(folder) / "result.json"
        job.write_text(
            json.dumps(
                {
                    "spec": {**dataclasses.asdict(plain), "checkpoint": str(spec.checkpoint)},
                    "prompts": list(prompts),
                    "out": str(Path(out).absolute()),
                    "reservoir_rows": reservoir_rows,
                    "max_tokens": max(1, max_tokens),
                    "second_moments": second_moments,
                    "second_moments_bytes": second_moments_bytes,
                    "result": str(result),
                }
            )
        )
        log = log or Path(folder) / "capture.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        code = _run_child(job, log, commands.engine_environment(plain))
        failure = json.loads(result.read_text()) if result.exists() else None
        if failure and failure["error"]:
            raise _typed(failure)
        if code or failure is None:
            tail = "\n    ".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
            raise EngineError(
                f"capturing activations failed (exit code {code}); the end of its log:\n    {tail}",
                fix=f"see the engine's own message: workbench serve {spec.checkpoint} --backend reference",
            )


def _run_child(job: Path, log: Path, env: dict[str, str]) -> int:
    child_command = [sys.executable, "-m", "workbench.serving.capture", str(job)]
    with log.open("wb") as stream:
        child = subprocess.Popen(
            [sys.executable, "-m", "workbench.serving.supervise", "0", *child_command],
            stdin=subprocess.PIPE,  # its end tells the supervisor that we are gone
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            start_new_session=True,
        )
        try:
            return child.wait()
        finally:
            assert child.stdin is not None
            child.stdin.close()
            child.wait()


def _typed(failure: dict[str, str]) -> Exception:
    """The child's error as the type it had there."""
    from workbench import errors

    kind = getattr(errors, failure["type"], None)
    if isinstance(kind, type) and issubclass(kind, errors.WorkbenchError):
        return kind(failure["error"], fix=failure["fix"])
    return EngineError(f"capturing activations failed: {failure['type']}: {failure['error']}")


# ---- in the child ----------------------------------------------------------------------------------------------------


def _main(job_path: str) -> int:
    from workbench.errors import WorkbenchError

    job = json.loads(Path(job_path).read_text())
    outcome = {"error": "", "type": "", "fix": ""}
    code = 0
    try:
        _capture(job)
    except WorkbenchError as error:
        outcome = {"error": error.message, "type": type(error).__name__, "fix": error.fix}
        code = 3
    Path(job["result"]).write_text(json.dumps(outcome))
    return code


def _capture(job: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    engine = EngineSpec(**job["spec"].pop("engine"))
    spec = ServeSpec(**{**job["spec"], "exclude": (), "engine": engine})
    llm = LLM(**_llm_arguments(spec))
    config = llm.llm_engine.vllm_config.quant_config
    recorder = config.recorder
    recorder.limit, recorder.moments = job["reservoir_rows"], job["second_moments"]
    recorder.full_bytes, recorder.enabled = job["second_moments_bytes"], True
    _check_lengths(llm, job["prompts"])
    prompts = [{"prompt_token_ids": p} if isinstance(p, list) else p for p in job["prompts"]]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=job["max_tokens"], temperature=0), use_tqdm=False)
    recorder.enabled = False
    recorder.write(
        Path(job["out"]),
        expected=sorted(config.capturable),
        metadata={
            "checkpoint": str(spec.checkpoint),
            "dtype": engine.dtype,
            "engine": commands.engine_version(),
            "prompts": str(len(outputs)),
            "prompt_tokens": str(sum(len(o.prompt_token_ids) for o in outputs)),
            "reservoir_rows": str(job["reservoir_rows"]),
        },
    )


def _check_lengths(llm: Any, prompts: list[str] | list[list[int]]) -> None:
    """Raise ConfigError naming the first prompt that leaves no room for a token in the model's context."""
    from workbench.errors import ConfigError

    limit, tokenizer = llm.llm_engine.model_config.max_model_len, llm.get_tokenizer()
    lengths = [len(p) if isinstance(p, list) else len(tokenizer.encode(p)) for p in prompts]
    too_long = [number for number, length in enumerate(lengths, start=1) if length >= limit]
    if too_long:
        raise ConfigError(
            f"prompt {too_long[0]} of {len(prompts)} has {lengths[too_long[0] - 1]} tokens, and {len(too_long)} in all "
            f"are too long for a context of {limit}",
            fix="raise engine.max_model_len (--max-model-len), or give shorter prompts",
        )


def _llm_arguments(spec: ServeSpec) -> dict[str, Any]:
    settings = commands.plugin_settings(spec, capture=True)
    arguments: dict[str, Any] = {
        "model": settings.checkpoint,
        "dtype": spec.engine.dtype,
        "load_format": "workbench",
        "model_loader_extra_config": settings.to_dict(),
        "hf_overrides": commands.hf_overrides(settings),
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "disable_log_stats": True,
        "seed": 0,
    }
    if commands.is_cpu_engine():
        arguments["kv_cache_memory_bytes"] = commands.CPU_KV_CACHE_BYTES
        if commands.uses_mla(settings.checkpoint):
            arguments["attention_backend"] = "CPU_MLA"  # the AMX one never calls kv_b_proj, so its input stays unseen
    if spec.engine.max_model_len:
        arguments["max_model_len"] = spec.engine.max_model_len
    arguments |= {k.lstrip("-").replace("-", "_"): v for k, v in spec.engine.args.items() if v is not None}
    return arguments


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
