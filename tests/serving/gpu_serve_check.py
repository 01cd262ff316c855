"""Serves models on one GPU with vLLM in process, CUDA graphs on, and checks and times the plugin: a short table.

    python tests/serving/gpu_serve_check.py [--only mini,exact,large,stock] [--out DIR]
    python tests/serving/gpu_serve_check.py --device cpu --only mini,exact --dump tests/serving/gpu_serve_reference.json

The second line made the CPU's side, which is kept beside this file; it is made again when mini-kimi changes.

Needs vLLM (0.26 or newer) and its requirements importable; the workbench is taken from this checkout where it is not
installed. Phases:
- mini: the shipped mini-kimi in bfloat16 as bf16, emulation W4A16 and W4A4, and requantized: decode tokens/s, load,
  memory; log-probabilities of prompts and the requantized bytes against the CPU's.
- exact: the same in float32, log-probabilities alone (MLA off: its kernels know 16 bits only).
- large: a random Qwen3-MoE of 8.9 B parameters, written here in NVFP4: bf16 (decoded at load), W4A16, W4A4,
  requantized.
- stock: the same checkpoint by vLLM's own path, plugin off.
--tiny runs all of it in a size for a CPU. An exception is printed and the next engine goes on; vLLM's own output is in
DIR/serve.log, every figure in DIR/serve.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # its first use compiles for more than a minute
}

import gpu_serve_engine as engine

REFERENCE = Path(__file__).with_name("gpu_serve_reference.json")
NONE = {"activations": "none"}
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("bf16", {"backend": "reference"}),
    "W4A16": ("nvfp4", {"backend": "emulation", **NONE}),
    "W4A4": ("nvfp4", {"backend": "emulation"}),
    "requant": ("nvfp4", {"backend": "requant", "format": "mxfp4"}),
}
PHASES = ("mini", "exact", "large", "stock")
# Largest mean |difference| of log-probabilities from the CPU's. In bfloat16 two correct engines differ by 0.02 without
# any quantization; rounded activations amplify a last bit over an FP4 boundary.
BANDS = {"float32": {"bf16": 1e-3, "W4A16": 1e-3}, "bfloat16": {"bf16": 0.05, "W4A16": 0.05}}
ROUNDED_BAND = {"float32": 0.05, "bfloat16": 0.3}
MIB = 1 << 20


class Check:
    """The run: its options, what it found so far, and where it prints."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.out = Path(options.out).resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.log = self.out / "serve.log"
        self.found: dict[str, dict[str, Any]] = {}
        known = Path(options.reference).resolve()
        self.reference = json.loads(known.read_text()) if known.exists() and not options.dump else {}

    def child(self, name: str, work: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        """Run `work` in a fork, its output to the log; {"error": …} where it failed, died or took too long."""
        result = self.folder / f"{name}.json"
        process = multiprocessing.get_context("fork").Process(target=_run, args=(result, self.log, work, arguments))
        process.start()
        process.join(self.options.limit)
        if process.is_alive():
            process.kill()
            process.join()
            found = {"error": f"took more than {self.options.limit} s"}
        elif result.exists():
            found = json.loads(result.read_text())
        else:
            found = {"error": f"died with exit code {process.exitcode}"}
        self.found[name] = found
        (self.out / "serve.json").write_text(json.dumps(self.found, indent=1))
        return found

    def engine(self, name: str, checkpoint: str, settings: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
        job = {
            "checkpoint": checkpoint,
            "settings": None if settings is None else {**settings, "checkpoint": checkpoint},
            "dtype": "bfloat16",
            "device": self.options.device,
            "batches": [],
            "new_tokens": 6 if self.options.tiny else 128,
            "prompts": [],
            "kv_bytes": 64 * MIB if self.options.tiny else 1024 * MIB,
            "eager": self.options.eager or self.options.device == "cpu",
            "audit": str(self.folder / f"{name}.audit.json"),
            "log": str(self.log),
            "hash": False,
            "compilation": json.loads(self.options.compilation),
            **options,
        }
        found = self.child(name, engine.run_engine, job)
        say(f"{name:15}" + _line(found))
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", default=",".join(PHASES), help="phases, comma-separated")
    parser.add_argument("--arms", default=",".join(ARMS), help="arms, comma-separated")
    parser.add_argument("--reference", default=str(REFERENCE), help="what --dump wrote on a CPU")
    parser.add_argument("--dump", help="write them here (phases mini and exact, no timing)")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--large", help="the large checkpoint: made in this folder and kept, or taken from it")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs, no torch.compile")
    parser.add_argument("--compilation", default="{}", help="JSON for compilation_config, beside the batch sizes")
    parser.add_argument("--limit", type=float, default=240, help="seconds an engine may take")
    parser.add_argument("--out", default=os.environ.get("OUT") or "serve-check")
    options = parser.parse_args()
    options.dump = options.dump and str(Path(options.dump).resolve())
    options.large = options.large and str(Path(options.large).resolve())
    phases = [p for p in PHASES if p in options.only.split(",")]
    with tempfile.TemporaryDirectory(prefix="serve-check-") as temporary:
        check = Check(options, Path(temporary))
        with engine.output_to(check.log):
            engine.make_importable(Path(temporary) / "importable")
            os.chdir(temporary)  # vLLM inspects models in a `python -m`, which looks for packages here first
            _import_once(options.device)
            import vllm
        say(f"vLLM {vllm.__version__} on {options.device}; log in {check.log}")
        arms = {name: arm for name, arm in ARMS.items() if name in options.arms.split(",")}
        if {"mini", "exact"} & set(phases):
            run_mini(check, phases, arms)
        if {"large", "stock"} & set(phases) and not options.dump:
            run_large(check, phases, arms)
    return 0


def run_mini(check: Check, phases: list[str], arms: dict[str, Any]) -> None:
    made = check.child("mini_made", engine.mini_checkpoints, check.folder)
    prompts = check.child("mini_prompts", _as_dict, engine.mini_prompts)
    if "error" in made or "error" in prompts:
        say(f"mini-kimi could not be made: {made.get('error') or prompts.get('error')}")
        return
    import vllm

    dumped: dict[str, Any] = {"made": f"vLLM {vllm.__version__}, {check.options.device}", "logprobs": {}, "digests": {}}
    for dtype, phase in (("bfloat16", "mini"), ("float32", "exact")):
        for name, (checkpoint, settings) in arms.items() if phase in phases else ():
            timed = phase == "mini" and not check.options.dump
            found = check.engine(
                f"{phase} {name}",
                made[checkpoint],
                settings,
                dtype=dtype,
                prompts=prompts["value"],
                batches=([1, 2] if check.options.tiny else [1, 64]) if timed else [],
                hash=name == "requant",
                **({"eager": True} if phase == "exact" else {}),
            )
            if "error" not in found:
                dumped["logprobs"][f"{dtype} {name}"] = found["logprobs"]
                if "digests" in found:  # by dtype: without MLA other modules are fused
                    dumped["digests"][dtype] = found["digests"]
                _compare(check.reference, dtype, name, found)
        if phase == "mini" and phase in phases and not check.options.dump:
            _ratios(check, "mini")
    if check.options.dump:
        Path(check.options.dump).write_text(json.dumps(dumped))
        say(f"wrote {check.options.dump}")


def run_large(check: Check, phases: list[str], arms: dict[str, Any]) -> None:
    size = engine.TINY if check.options.tiny else engine.LARGE
    folder = Path(check.options.large or check.folder / "large")
    if not (folder / "config.json").exists():
        made = check.child("large_made", engine.make_large, folder, size, check.options.device)
        if "error" in made:
            say(f"the large model could not be made: {made['error']}")
            return
        parameters, stored = made["parameters"] / 1e9, made["bytes"] / 1e9
        say(f"large: {parameters:.2f} B parameters, {stored:.2f} GB, {made['seconds']:.0f} s")
    options = {"batches": [1, 2] if check.options.tiny else [1, 32]}
    if not check.options.tiny:
        options["kv_bytes"] = 4096 * MIB
    if "large" in phases:
        for name, (_, settings) in arms.items():
            check.engine(f"large {name}", str(folder), settings, **options)
    if "stock" in phases:
        check.engine("large stock", str(folder), None, **options)
    _ratios(check, "large")


def _import_once(device: str) -> None:
    """What every engine needs, for all forks. A fork cannot use a GPU that its parent has touched."""
    import torch
    from vllm import LLM  # noqa: F401

    if device == "cuda":
        import vllm.v1.worker.gpu_worker  # noqa: F401
    assert not torch.cuda.is_initialized(), "importing vLLM has touched the GPU; its engines cannot be forked"


def say(line: str) -> None:
    print(line, flush=True)


def _run(result: Path, log: Path, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    with engine.output_to(log):
        try:
            found = work(*arguments)
        except BaseException as error:
            traceback.print_exc()
            lines = [line for line in str(error).splitlines() if line.strip()]
            found = {"error": f"{type(error).__name__}: {lines[-1][:200] if lines else ''}"}
        temporary = result.with_suffix(".new")
        temporary.write_text(json.dumps(found))
        temporary.rename(result)


def _as_dict(work: Callable[[], Any]) -> dict[str, Any]:
    return {"value": work()}


def _line(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"FAILED {found['error']}"
    parts = [
        f"{batch}: {found[f'tok_s_{batch}']:.1f} tok/s ({min(each):.0f} to {max(each):.0f})"
        for batch, each in ((k.removeprefix("tok_s_each_"), v) for k, v in found.items() if k.startswith("tok_s_each_"))
    ]
    parts.append(f"start {found['start_s']:.1f} s")
    audit = found.get("audit")
    if audit is None:
        parts.append(f"weights {found.get('vllm_weights_s', 0):.2f} s, {found.get('vllm_model_gib', 0):.2f} GiB")
        return "  ".join(parts)
    load = audit["load"]
    parts.append(
        f"load {audit['load_s']:.2f} s (weights {audit['weights_s']:.2f}: read {load['read_s']:.2f},"
        f" convert {load['convert_s']:.2f}, of it waiting {load['prepare_waited_s']:.2f} of the kernels'"
        f" {load['prepare_s']:.2f})"
    )
    parts.append(f"weights {audit['total_bytes'] / MIB:.0f} MiB")
    if load["device_peak_bytes"] is not None:
        over = (load["device_peak_bytes"] - load["device_final_bytes"]) / MIB
        parts.append(f"peak over final {over:.1f} (largest layer {_largest_layer(audit) / MIB:.0f})")
        parts.append(f"convert peak {load['convert_peak_bytes'] / MIB:.1f} MiB")
    return "  ".join(parts)


def _largest_layer(audit: dict[str, Any]) -> int:
    from workbench.serving.vllm_plugin.meter import layer_of

    layers: dict[str, int] = {}
    for name, entry in audit["layers"].items():
        layers[layer_of(f"{name}.")] = layers.get(layer_of(f"{name}."), 0) + entry["weight_bytes"]
    return max(layers.values())


def _compare(reference: dict[str, Any], dtype: str, name: str, found: dict[str, Any]) -> None:
    expected = reference.get("logprobs", {}).get(f"{dtype} {name}")
    if expected is not None:
        differences = [abs(a - b) for a, b in zip(found["logprobs"], expected, strict=True)]
        mean, band = sum(differences) / len(differences), BANDS[dtype].get(name, ROUNDED_BAND[dtype])
        verdict = "ok" if mean <= band else "NOT WITHIN"
        middle = sorted(differences)[len(differences) // 2]
        say(
            f"    log-probabilities against the CPU, {dtype}: mean |d| {mean:.2g}, median {middle:.2g}, largest"
            f" {max(differences):.2g}; {verdict} {band:g}"
        )
    digests = found.get("digests")
    layouts = reference.get("digests", {}).values()  # with MLA and without: other modules are fused
    known = next((layout for layout in layouts if digests and layout.keys() == digests.keys()), None)
    if digests and not known:
        say("    requantized bytes: the CPU's reference has no such modules: NOT COMPARED")
    if digests and known:
        same = [k for k, v in known.items() if digests.get(k) == v]
        verdict = "ok" if len(same) == len(known) == len(digests) else "NOT EQUAL"
        say(f"    requantized bytes: {len(same)} of {len(known)} equal: {verdict}")


def _ratios(check: Check, phase: str) -> None:
    """Decode speed over bf16's, and what conversion adds to the load."""
    base = check.found.get(f"{phase} bf16", {})
    for name in (*ARMS, "stock"):
        found = check.found.get(f"{phase} {name}", {})
        keys = [k for k in found if k.startswith("tok_s_") and isinstance(found[k], float) and k in base]
        if name != "bf16" and keys:
            ratios = ", ".join(f"batch {k.removeprefix('tok_s_')}: {found[k] / base[k]:.2f}" for k in keys)
            say(f"    {phase} {name} / bf16: {ratios} (goal 0.8)")
        if name == "requant" and "audit" in found:
            cost, weights = found["audit"]["load"]["convert_s"], found["audit"]["weights_s"]
            say(f"    {phase} requant: conversion {100 * cost / weights:.1f} % of the weights' load (goal 10)")


if __name__ == "__main__":
    started = time.perf_counter()
    code = main()
    say(f"{time.perf_counter() - started:.0f} s in all")
    sys.exit(code)
