"""One subprocess runs every in-process engine of these tests; its results are shared by all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from tiny_models import EXCLUDED, make_deepseek, make_dense, make_prompts, make_qwen

from workbench.serving.numerics import WORKER


@dataclass(frozen=True)
class EngineResults:
    """folder: checkpoints by name. prompts: token ids. jobs: {key: what engine_jobs.py saved}. numerics: {key: a job
    of numerics_jobs.py, which was run}."""

    folder: Path
    prompts: list[list[int]]
    jobs: dict[str, dict]
    numerics: dict[str, dict]

    def audit(self, key: str) -> dict:
        return json.loads((self.folder / f"{key}.audit.json").read_text())


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> Path:
    """Tiny models and what was made of them: <model>, _nvfp4, _static (with input scales), _mxfp4, _dense, _f32, and
    small_apart, whose fused matrices have global and input scales of their own."""
    from workbench.checkpoints.convert import quantize_checkpoint

    folder = tmp_path_factory.mktemp("engine")
    for name, make in (("deepseek", make_deepseek), ("qwen", make_qwen)):
        source = make(folder / name)
        nvfp4 = folder / f"{name}_nvfp4"
        quantize_checkpoint(source, nvfp4, format="nvfp4", dialect="modelopt")
        quantize_checkpoint(nvfp4, folder / f"{name}_mxfp4", format="mxfp4", dialect="quark")
        quantize_checkpoint(nvfp4, folder / f"{name}_dense", format="bf16", dialect="plain")
        quantize_checkpoint(nvfp4, folder / f"{name}_f32", format="f32", dialect="plain")
    make_dense(folder / "small")
    for name in ("qwen", "small"):
        quantize_checkpoint(
            folder / name,
            folder / f"{name}_static",
            format="nvfp4",
            dialect="modelopt",
            input_amax=_amax(folder / name),
        )
    amax = _amax(folder / "small")
    quantize_checkpoint(
        folder / "small",
        folder / "small_apart",
        format="nvfp4",
        dialect="modelopt",
        shared_globals=False,
        input_amax={m: a * (2.0 if m.endswith(("k_proj", "up_proj")) else 1.0) for m, a in amax.items()},
    )
    return folder


@pytest.fixture(scope="session")
def engine(checkpoints) -> EngineResults:
    """Every engine run of these tests, in one process of about a minute."""
    prompts = make_prompts()
    jobs: list[dict] = []

    def add(
        key: str,
        checkpoint: str,
        dtype: str = "bfloat16",
        *,
        activations_file: str = "",
        stock: bool = False,
        parallel: dict | None = None,
        **settings,
    ) -> None:
        settings |= {"checkpoint": str(checkpoints / checkpoint), "audit": str(checkpoints / f"{key}.audit.json")}
        jobs.append(
            {
                "key": key,
                "settings": settings,
                "dtype": dtype,
                "prompts": prompts,
                "new_tokens": 1 if activations_file else 4,
                "activations": activations_file,
                "stock": stock,
                "parallel": parallel or {},
            }
        )

    for model in ("deepseek", "qwen"):
        add(f"{model}_weight_only", f"{model}_nvfp4", backend="emulation", activations="none")
        add(f"{model}_dense", f"{model}_dense")
    add("deepseek_reference", "deepseek_nvfp4")
    add("deepseek_requant", "deepseek_nvfp4", backend="requant", format="mxfp4", exclude=[EXCLUDED])
    add("deepseek_mxfp4", "deepseek_mxfp4", backend="emulation", exclude=[EXCLUDED])
    add("deepseek_exact", "deepseek_nvfp4", "float32", backend="emulation")
    two = {"tensor_parallel_size": 2}
    add("deepseek_two_tp", "deepseek_nvfp4", "float32", parallel=two, backend="emulation")
    add(
        "deepseek_two_ep",
        "deepseek_nvfp4",
        "float32",
        parallel={**two, "enable_expert_parallel": True},
        backend="emulation",
    )
    add("qwen_exact", "qwen_static", "float32", backend="emulation")
    add("small_ours", "small_static", backend="emulation")
    add("small_stock", "small_static", stock=True)
    add("apart_as_vllm", "small_apart", backend="emulation", compat="vllm")
    add("apart_stock", "small_apart", stock=True)
    add("qwen_direct", "qwen", backend="requant", format="mxfp4")
    add("deepseek_capture", "deepseek", "float32", capture=True, activations_file=str(checkpoints / "captured"))
    numerics = {}
    for key, checkpoint, backend, worker in (
        ("intact", "deepseek_nvfp4", "emulation", WORKER),
        ("fallback", "deepseek_nvfp4", "emulation", "numerics_jobs.SilentFallbackWorker"),
        ("stock", "deepseek", "stock", WORKER),
    ):
        files = {name: str(checkpoints / f"{key}.{name}.json") for name in ("facts", "audit")}
        numerics[key] = {"checkpoint": str(checkpoints / checkpoint), "backend": backend, "worker": worker, **files}
        jobs.append({"key": key, "numerics": numerics[key]})
    (checkpoints / "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).with_name("engine_jobs.py")
    with (checkpoints / "engine.log").open("wb") as log:
        code = subprocess.run(
            [sys.executable, str(script), str(checkpoints / "jobs.json"), str(checkpoints / "results.pt")],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
            check=False,
        ).returncode
    assert code == 0, (checkpoints / "engine.log").read_text(errors="replace")[-4000:]
    results = torch.load(checkpoints / "results.pt", weights_only=False)
    failed = {k: r["error"] for k, r in results.items() if "error" in r}
    assert not failed, failed
    return EngineResults(checkpoints, prompts, results, numerics)


def _amax(path: Path) -> dict[str, float]:
    """Largest inputs of every module on the test prompts, by the oracle."""
    from oracle import prompt_logprobs

    largest: dict[str, float] = {}

    def note(module: str, x: torch.Tensor) -> torch.Tensor:
        largest[module] = max(largest.get(module, 0.0), float(x.abs().amax()))
        return x

    prompt_logprobs(path, make_prompts(), note)
    return largest
