"""vLLM's worker, which also writes down what it really runs.

    WORKBENCH_NUMERICS='{"path": "facts.json", "checkpoint": "DIR"}' VLLM_PLUGINS= \
        python -m vllm.entrypoints.openai.api_server --model DIR \
        --worker-cls workbench.serving.numerics_worker.NumericsWorker

A subclass of the platform's own worker, chosen by an option that vLLM has for it: nothing is patched, no plugin is
needed, no route is opened. Once the engine is warm (weights repacked, graphs captured), and before the first request,
the loaded modules are inspected and probed; random states are left as they were. One file a rank, `<path>` and
`<path>.rank<r>`: {"engine_version", "rank", "ranks", "device", "seconds", "error", "layers"} (`inspect_model`'s).
Without WORKBENCH_NUMERICS the worker is vLLM's. Whatever goes wrong is written into the file; the server starts anyway.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform

from workbench.records import write_text

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker as EngineWorker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as EngineWorker

logger = init_logger("vllm.workbench")  # only loggers under "vllm" are shown

JOB = "WORKBENCH_NUMERICS"  # environment variable: {"path", "checkpoint", "format", "rule"}, the last three optional


class NumericsWorker(EngineWorker):
    """The platform's worker; see the module's description."""

    def compile_or_warm_up_model(self) -> Any:
        done = super().compile_or_warm_up_model()
        if os.environ.get(JOB):
            write_facts(self, json.loads(os.environ[JOB]))
        return done


def write_facts(worker: Any, job: dict[str, str]) -> None:
    """Inspect and probe `worker`'s model and write the facts of this rank."""
    from .command import engine_version

    started = time.perf_counter()
    rank = int(worker.rank)
    facts: dict[str, Any] = {
        "engine_version": engine_version(),
        "rank": rank,
        "ranks": int(worker.parallel_config.world_size),
        "device": _device_name(worker.device),
        "error": "",
        "layers": [],
    }
    try:
        facts["layers"] = _inspect(worker, job)
    except Exception as error:  # a card must not cost the server
        facts["error"] = f"{type(error).__name__}: {error}"[:500]
        logger.warning("numerics: %s", facts["error"])
    facts["seconds"] = round(time.perf_counter() - started, 3)
    path = Path(job["path"])
    write_text(path if rank == 0 else path.with_name(f"{path.name}.rank{rank}"), json.dumps(facts, indent=1) + "\n")
    logger.info("numerics: %d modules in %.1f s", len(facts["layers"]), facts["seconds"])


def _inspect(worker: Any, job: dict[str, str]) -> list[dict[str, Any]]:
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    from .numerics_modules import inspect_model
    from .numerics_reference import References

    model = worker.get_model()
    references = None
    if job.get("checkpoint"):
        references = References(job["checkpoint"], model, format=job.get("format", ""), rule=job.get("rule", ""))
    config = worker.vllm_config
    try:
        with torch.inference_mode(), set_current_vllm_config(config), set_forward_context(None, config):
            return inspect_model(model, references, dtype=worker.model_config.dtype)
    finally:
        if references is not None:
            references.close()
        if worker.device.type == "cuda":
            torch.cuda.empty_cache()  # the probe's own buffers


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device.type)
