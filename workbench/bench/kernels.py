"""How fast the CPU kernels are, against the reference, compressed-tensors' and torchao's eager code, and a memcpy.

    result = bench_kernels(rows=2048, columns=7168, threads=2, repeats=5)
    print(table(result))

All contenders work on the same bfloat16 tensor in the same process, one after the other within each repeat, so that a
busy machine slows them alike; compare ratios, not absolute numbers. A measurement is the mean of as many calls as fit
into a tenth of a second (at least one); the table has medians over the repeats, and in brackets the smallest and the
largest. GB/s counts what a function must read and write, once; the memcpy beside it is torch's copy of the same weights
in float32. Producers' tools are measured where they are installed and are otherwise left out by name.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workbench.bench.machine import processor
from workbench.errors import ConfigError
from workbench.kernels import cpu, reference
from workbench.kernels.tables import MXFP4_BLOCK, MXFP4_RULES, NVFP4_BLOCK

RIVALS = ("reference", "compressed-tensors", "torchao")
MOST_WEIGHTS = 1 << 32
_LONG_ENOUGH_S = 0.1

Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A median over the repeats, the smallest and the largest of them."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSpeed:
    """One function. ratios: how many times as long each of RIVALS takes; a rival without the function is absent.

    bytes_per_weight: read and written, once each. of_memcpy: its bytes a second as a fraction of a memcpy's.
    """

    function: str
    weights_per_s: Measured
    bytes_per_weight: float
    ratios: dict[str, Measured]
    of_memcpy: Measured

    @property
    def gb_per_s(self) -> float:
        return self.weights_per_s.median * self.bytes_per_weight / 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelBench:
    """What `bench_kernels` measured, where and on what. load: 1-minute load averages before and after."""

    date: str
    machine: str
    cores: int
    threads: int
    load: tuple[float, float]
    rows: int
    columns: int
    repeats: int
    versions: dict[str, str]
    memcpy_gb_per_s: Measured
    functions: tuple[KernelSpeed, ...]


def bench_kernels(*, rows: int, columns: int, threads: int, repeats: int) -> KernelBench:
    """Measure every function of `kernels.cpu` on one random bfloat16 matrix `[rows, columns]`.

    Raises ConfigError for sizes that the formats' blocks do not divide, or that are not positive.
    """
    if min(rows, columns, threads, repeats) < 1 or columns % MXFP4_BLOCK or rows * columns > MOST_WEIGHTS:
        raise ConfigError(
            f"rows {rows}, columns {columns}, threads {threads}, repeats {repeats} cannot be measured",
            fix=f"give positive numbers, columns a multiple of {MXFP4_BLOCK}, at most {MOST_WEIGHTS} weights in all",
        )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _measure(torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16(), repeats)
    finally:
        torch.set_num_threads(before)


def table(result: KernelBench) -> str:
    """The result as a Markdown table, ratios first."""

    def number(m: Measured, digits: int) -> str:
        return f"{m.median:.{digits}f} ({m.low:.{digits}f} to {m.high:.{digits}f})"

    rivals = [name for name in RIVALS if any(name in speed.ratios for speed in result.functions)]
    columns = ["function", *(f"times {name}" for name in rivals), "M weights/s", "GB/s", "of memcpy"]
    lines = [
        f"{result.machine}, {result.cores} cores, {result.threads} threads, load {result.load[0]:.1f} to "
        f"{result.load[1]:.1f}, {result.date}",
        f"bfloat16 [{result.rows}, {result.columns}], median of {result.repeats} repeats (smallest to largest); "
        + ", ".join(f"{name} {version}" for name, version in result.versions.items()),
        f"memcpy: {number(result.memcpy_gb_per_s, 1)} GB/s",
        *(f"{name}: not installed, not measured" for name in RIVALS if name not in result.versions),
        "",
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
    ]
    for speed in result.functions:
        weights = Measured(**{k: getattr(speed.weights_per_s, k) / 1e6 for k in ("median", "low", "high")})
        cells = [number(speed.ratios[name], 1) if name in speed.ratios else "-" for name in rivals]
        cells += [number(weights, 0), f"{speed.gb_per_s:.1f}", f"{100 * speed.of_memcpy.median:.0f} %"]
        lines.append(f"| {' | '.join([speed.function, *cells])} |")
    return "\n".join(lines)


# ---- measuring -------------------------------------------------------------------------------------------------------


def _measure(w: Tensor, repeats: int) -> KernelBench:
    load = os.getloadavg()[0]
    versions = {"reference": f"of workbench {importlib.metadata.version('quantization-workbench')}"}
    contenders = {"cpu": _workbench(cpu, w), "reference": _workbench(reference, w)}
    for name, calls in (("compressed-tensors", _compressed_tensors), ("torchao", _torchao)):
        with suppress(ImportError):
            contenders[name] = calls(w)
            versions[name] = importlib.metadata.version(name)
    source = w.float()
    target = torch.empty_like(source)
    copy = _Copy(call=partial(target.copy_, source), nbytes=2 * source.nbytes)
    speeds = [
        _compare({name: calls[f] for name, calls in contenders.items() if f in calls}, copy, f, w.numel(), repeats)
        for f in _bytes_per_weight()
    ]
    return KernelBench(
        date=time.strftime("%Y-%m-%d"),
        machine=processor(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        load=(load, os.getloadavg()[0]),
        rows=w.shape[0],
        columns=w.shape[1],
        repeats=repeats,
        versions={**versions, "torch": torch.__version__, "numba": importlib.metadata.version("numba")},
        memcpy_gb_per_s=_middle([copy.nbytes / seconds / 1e9 for _, taken in speeds for seconds in taken]),
        functions=tuple(speed for speed, _ in speeds),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Copy:
    """A memcpy, and the bytes that it reads and writes."""

    call: Call
    nbytes: int


def _compare(
    calls: dict[str, Call], copy: _Copy, function: str, weights: int, repeats: int
) -> tuple[KernelSpeed, list[float]]:
    """One function's row, and the seconds that the memcpy took in each repeat."""
    copy.call()
    calls["cpu"]()  # compiled, or loaded, before time is taken
    rounds = [{name: _seconds(call) for name, call in {**calls, "memcpy": copy.call}.items()} for _ in range(repeats)]
    size = _bytes_per_weight()[function]
    speed = KernelSpeed(
        function=function,
        weights_per_s=_middle([weights / r["cpu"] for r in rounds]),
        bytes_per_weight=size,
        ratios={name: _middle([r[name] / r["cpu"] for r in rounds]) for name in calls if name != "cpu"},
        of_memcpy=_middle([size * weights / r["cpu"] / (copy.nbytes / r["memcpy"]) for r in rounds]),
    )
    return speed, [r["memcpy"] for r in rounds]


def _seconds(call: Call) -> float:
    """Mean wall time of a call."""
    calls, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < _LONG_ENOUGH_S or not calls:
        call()
        calls += 1
    return passed / calls


def _middle(values: list[float]) -> Measured:
    return Measured(median=statistics.median(values), low=min(values), high=max(values))


# ---- contenders ------------------------------------------------------------------------------------------------------


def _bytes_per_weight() -> dict[str, float]:
    """Every function that is measured. Weights and results are bfloat16, activations are rounded in place of a copy."""
    nvfp4, mxfp4 = 0.5 + 1 / NVFP4_BLOCK, 0.5 + 1 / MXFP4_BLOCK
    return {
        "nvfp4 quantize (amax)": 2 + 2 + nvfp4,  # the tensor's largest magnitude needs a pass of its own
        "nvfp4 dequantize": nvfp4 + 2,
        "nvfp4 activation": 2 + 2,
        **{f"mxfp4 quantize ({rule})": 2 + mxfp4 for rule in MXFP4_RULES},
        "mxfp4 dequantize": mxfp4 + 2,
        "mxfp4 activation": 2 + 2,
    }


def _workbench(kernels: Any, w: Tensor) -> dict[str, Call]:
    nvfp4, mxfp4 = cpu.nvfp4_quantize(w), cpu.mxfp4_quantize(w)

    def decoded(function: Callable[..., Tensor], *parts: Tensor) -> Call:
        if kernels is cpu:
            return lambda: function(*parts, torch.bfloat16)
        return lambda: function(*parts).bfloat16()

    return {
        "nvfp4 quantize (amax)": lambda: kernels.nvfp4_quantize(w),
        "nvfp4 dequantize": decoded(kernels.nvfp4_dequantize, *nvfp4),
        "nvfp4 activation": lambda: kernels.nvfp4_qdq_activation(w),
        **{f"mxfp4 quantize ({rule})": partial(kernels.mxfp4_quantize, w, rule) for rule in MXFP4_RULES},
        "mxfp4 dequantize": decoded(kernels.mxfp4_dequantize, *mxfp4),
        "mxfp4 activation": lambda: kernels.mxfp4_qdq_activation(w),
    }


def _compressed_tensors(w: Tensor) -> dict[str, Call]:
    """Scales from the weights as llm-compressor's observer takes them, then compress and decompress. Its MXFP4 scales
    are those of `even`."""
    utils = importlib.import_module("compressed_tensors.quantization.utils")
    schemes = importlib.import_module("compressed_tensors.quantization.quant_scheme")
    compressors = importlib.import_module("compressed_tensors.compressors")

    def calls(preset: str, compressor: Any) -> tuple[Call, Call]:
        scheme = schemes.preset_name_to_scheme(preset, ["Linear"])

        def quantize() -> Any:
            blocks = w.view(w.shape[0], -1, scheme.weights.group_size)
            low, high = blocks.amin(-1), blocks.amax(-1)
            parts: dict[str, Any] = {"weight": w, "weight_global_scale": None}
            if preset == "NVFP4":
                parts["weight_global_scale"] = utils.generate_gparam(low.amin().view(1), high.amax().view(1))
            parts["weight_scale"], _ = utils.calculate_qparams(
                low, high, scheme.weights, global_scale=parts["weight_global_scale"]
            )
            return compressor.compress(parts, scheme)

        packed = quantize()
        return quantize, lambda: compressor.decompress(packed, scheme)

    nvfp4 = calls("NVFP4", compressors.NVFP4PackedCompressor)
    mxfp4 = calls("MXFP4", compressors.MXFP4PackedCompressor)
    return {
        "nvfp4 quantize (amax)": nvfp4[0],
        "nvfp4 dequantize": nvfp4[1],
        "mxfp4 quantize (even)": mxfp4[0],
        "mxfp4 dequantize": mxfp4[1],
    }


def _torchao(w: Tensor) -> dict[str, Call]:
    nv = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")
    mx = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")

    def nvfp4() -> Any:
        return nv.NVFP4Tensor.to_nvfp4(w, per_tensor_scale=nv.per_tensor_amax_to_scale(w.abs().amax()))

    def mxfp4(rule: str) -> Any:
        mode = mx.ScaleCalculationMode[rule.upper()]
        return mx.MXTensor.to_mx(w, torch.float4_e2m1fn_x2, MXFP4_BLOCK, scaling_mode=mode)

    nvfp4_packed, mxfp4_packed = nvfp4(), mxfp4("even")
    return {
        "nvfp4 quantize (amax)": nvfp4,
        "nvfp4 dequantize": lambda: nvfp4_packed.dequantize(torch.bfloat16),
        **{f"mxfp4 quantize ({rule})": partial(mxfp4, rule) for rule in MXFP4_RULES},
        "mxfp4 dequantize": lambda: mxfp4_packed.dequantize(torch.bfloat16),
    }
