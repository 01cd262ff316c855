"""What making the conversion's kernels ready in a thread saves on a CUDA card, and that it makes ready all of them.

    python tests/serving/gpu_preparation_check.py

Converts 128 experts of three matrices and decodes one more, as a load does: without a preparation (none), three seconds
after one has started, in which this thread mostly sleeps (idle) or keeps the interpreter (busy), and at once (late).
Each in a process of its own, with an empty cache of Triton's and with the kernels on disk. Needs torch and Triton
alone. Exit code 1 where a prepared load compiles or loads another kernel, or gives other bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
MODES = ("none", "idle", "busy", "late")
BESIDE_S = 3.0
EXPERTS, HIDDEN, INTERMEDIATE = 128, 2048, 768


def main() -> int:
    digests, complete = set(), True
    for cache, mode in [(cache, mode) for cache in ("empty", "full") for mode in MODES]:
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(1 if cache == "empty" else 2):  # the first run fills it
                done = subprocess.run(
                    [sys.executable, __file__, mode],
                    env={**os.environ, "TRITON_CACHE_DIR": folder},
                    capture_output=True,
                    text=True,
                    check=False,
                )
        if done.returncode:
            print(done.stderr)
            return 1
        found = json.loads(done.stdout.splitlines()[-1])
        digests.add(found.pop("bytes"))
        complete &= mode == "none" or not found["kernels_later"]
        print(f"cache {cache}, {mode}: {found}", flush=True)
    print(f"bytes {'equal' if len(digests) == 1 else 'NOT EQUAL'}; every kernel {'ready' if complete else 'NOT READY'}")
    return 0 if complete and len(digests) == 1 else 1


def load(mode: str) -> dict[str, Any]:
    import from_source

    from_source.make_importable()
    import torch._dynamo
    import torch._inductor.runtime.triton_heuristics
    import triton.language  # noqa: F401  as vLLM has, when it loads a model
    from workbench.kernels.tables import ScaleRule

    from workbench.serving.vllm_plugin import conversion
    from workbench.serving.vllm_plugin.meter import LoadMeter
    from workbench.serving.vllm_plugin.preparation import Launch, prepare
    from workbench.serving.vllm_plugin.settings import ModulePlan, PluginSettings
    from workbench.serving.vllm_plugin.together import AT_MOST, requantize_together

    device = torch.device("cuda", 0)
    generator = torch.Generator().manual_seed(0)
    members = {
        f"model.layers.0.mlp.experts.{e}.{name}.weight": random_nvfp4(shape, generator)
        for e in range(EXPERTS)
        for name, shape in (
            ("gate_proj", (INTERMEDIATE, HIDDEN)),
            ("up_proj", (INTERMEDIATE, HIDDEN)),
            ("down_proj", (HIDDEN, INTERMEDIATE)),
        )
    }
    single = random_nvfp4((4096, 512), generator)
    (
        torch.ones(8, 8, device=device, dtype=torch.bfloat16) @ torch.ones(8, 8, device=device, dtype=torch.bfloat16)
    ).sum()
    torch.cuda.synchronize()
    launches = {
        Launch("nvfp4", "mxfp4", AT_MOST, INTERMEDIATE * HIDDEN // 32),
        Launch("nvfp4", "mxfp4", 1, 4096 * 512 // 32),
        Launch("mxfp4", "mxfp4", 1, 4096 * 512 // 32),
    }
    started = time.perf_counter()
    preparation = prepare(launches, device, "", torch.bfloat16) if mode != "none" else None
    while mode in ("idle", "busy") and time.perf_counter() - started < BESIDE_S:
        if mode == "idle":
            time.sleep(0.001)
        torch.empty(1 << 16, device=device)
        sum(range(1000))
    meter = LoadMeter(device, preparation)
    with meter.converting("wait"):
        pass  # the waiting alone
    before = compiled() if preparation else 0  # it imports the kernels, which a load without pays later
    names, digest = list(members), hashlib.sha256()
    seconds = []
    for layer in range(2):
        began = time.perf_counter()
        for at in range(0, len(names), AT_MOST):
            batch = {n: members[n] for n in names[at : at + AT_MOST]}
            for packed in requantize_together(batch, ScaleRule.EVEN, meter, name=f"model.layers.{layer}.x").values():
                if layer == 0 and at == 0:
                    digest.update(packed.codes.cpu().numpy().tobytes())
        settings = PluginSettings(checkpoint="c", backend="requant", format="mxfp4")
        plan = ModulePlan("m", "nvfp4", "mxfp4", "mxfp4", False)
        packed = conversion.convert_tensor(f"model.layers.{layer}.y", single, plan, settings, meter)
        dense = conversion.decode_tensor(f"model.layers.{layer}.y", packed, torch.bfloat16, meter)
        digest.update(dense.float().cpu().numpy().tobytes())
        seconds.append(round(time.perf_counter() - began, 4))
    meter.finish()
    record = meter.record()
    return {
        "prepare_s": record["prepare_s"],
        "waited_s": record["prepare_waited_s"],
        "convert_s": [round(c["seconds"], 4) for c in record["converted"].values()],
        "with reading": seconds,
        "kernels_later": compiled() - before,
        "bytes": digest.hexdigest(),
    }


def random_nvfp4(shape: tuple[int, int], generator: torch.Generator) -> Any:
    from workbench.formats import QuantizedTensor

    n, k = shape
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0x20, 0x60, (n, k // 16), dtype=torch.uint8, generator=generator)
    return QuantizedTensor(
        format="nvfp4",
        codes=codes,
        block_scales=scales.view(torch.float8_e4m3fn),
        global_scale=torch.rand((), generator=generator) + 0.5,
        shape=shape,
    )


def compiled() -> int:
    """Kernels of ours that this process has compiled or loaded."""
    from workbench.kernels import triton_dequantize, triton_requant

    kernels = (triton_requant._requant_kernel, triton_requant._table_kernel, triton_dequantize._fp4_kernel)
    return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(main())
    print(json.dumps(load(sys.argv[1])))
