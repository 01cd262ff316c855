"""`workbench analyze --device cuda` on a card against the processor: equal columns, seconds, gigabytes a second.

    python tests/analysis/gpu_analysis_check.py
    python tests/analysis/gpu_analysis_check.py --device cpu --tiny     # torch's sums against the loops', no card

Runs from a checkout. Single matrices of many formats, then mini-kimi (NVFP4 made here), then generated experts of
2048 x 7168 (4 GB of bfloat16, 1 GB of NVFP4); both devices read what has just been written. Bands: `table_bands.py`.
Then the experts once more from files that the page cache no longer holds, beside plain sequential reads of these files.
At last `workbench sensitivity` of a few units: the model runs in float32 there and here, its sums in another order, so
a divergence may differ by 1e-5 nats and a thousandth of itself. Exits 1 where anything differs by more.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KL_ABSOLUTE, KL_RELATIVE = 1e-5, 1e-3


def prepare() -> None:
    """`workbench` and the scripts beside this one importable."""
    location = ROOT / "tests" / "kernels" / "from_source.py"
    spec = importlib.util.spec_from_file_location("from_source", location)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.make_importable()
    sys.path.insert(0, str(HERE))


def workbench(*arguments: object) -> tuple[float, int]:
    """Seconds and exit code of a command in this process; what it printed is shown where it could not run."""
    from workbench.cli import main

    printed, start = io.StringIO(), time.perf_counter()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main([str(argument) for argument in arguments])
    if code not in (0, 2):
        raise SystemExit(f"workbench {' '.join(map(str, arguments))}: exit {code}\n{printed.getvalue()}")
    return time.perf_counter() - start, code


@contextlib.contextmanager
def measuring_on(device: str, loops: bool):  # type: ignore[no-untyped-def]
    """Without a card, the other implementation."""
    from workbench.analysis import chunks

    before = chunks.on_loops
    chunks.on_loops = (lambda of: of.type == "cpu") if loops else (lambda of: False)
    try:
        yield
    finally:
        chunks.on_loops = before


def check_matrices(device: str) -> list[str]:
    from device_cases import cases, different, magnitudes

    from workbench.analysis.algebra import measure_sides

    wrong, here, there = [], cases(), cases(device)
    for name, make in here.items():
        want, terms = measure_sides(make()), magnitudes(make())
        with measuring_on(device, loops=False):
            for elements in (None, 1 << 18):
                found = measure_sides(there[name](), elements=elements)
                wrong += [f"{name}: {line}" for line in different(found, want, terms)]
    print(f"matrices: {len(here)} kinds, {len(wrong)} differences", flush=True)
    return wrong


def compare(name: str, source: Path, first: Path, out: Path, device: str) -> tuple[str, list[str]]:
    """Both devices' tables of one pair; a line for the table, and what differs."""
    from table_bands import compare_tables, largest_differences

    from workbench.analysis.tensors import read_frame

    stored = sum(path.stat().st_size for folder in (source, first) for path in folder.glob("*.safetensors"))
    seconds, frames = {}, {}
    for where, loops in ((device, False), ("cpu", True)):
        folder = out / f"{name}-{'loops' if loops else 'torch'}"
        with measuring_on(where, loops):
            command = ["analyze", "--source", source, "--first", first, "--second", "mxfp4", "--device", where]
            seconds[loops], _ = workbench(*command, "--out", folder)
        frames[loops] = read_frame(folder / "tensors.parquet")
        if not loops:
            peak = json.loads((folder / "manifest.json").read_text())["device_peak_bytes"]
    wrong = [f"{name}: {line}" for line in compare_tables(frames[False], frames[True])]
    if frames[False].attrs["error_density"] != frames[True].attrs["error_density"]:
        wrong.append(f"{name}: error_density differs")
    shares = ", ".join(
        f"{kind} {share:.2g}" for kind, share in largest_differences(frames[False], frames[True]).items()
    )
    line = (
        f"{name:10} {len(frames[True]):5} matrices {stored / 1e9:6.2f} GB: cpu {seconds[True]:6.2f} s "
        f"{stored / seconds[True] / 1e9:5.2f} GB/s, {device} {seconds[False]:6.2f} s "
        f"{stored / seconds[False] / 1e9:5.2f} GB/s, {seconds[True] / seconds[False]:5.2f} times; "
        f"peak {peak / 1e9:.2f} GB; of its band: {shares}"
    )
    print(line, flush=True)
    return line, wrong


def forget(files: list[Path]) -> None:
    """Have the page cache drop the files, as far as the system does."""
    for path in files:
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_rate(files: list[Path]) -> float:
    """Bytes a second of one thread that reads the files one after the other, 8 MiB a call."""
    buffer, read, begin = memoryview(bytearray(8 << 20)), 0, time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                read += count
    return read / (time.perf_counter() - begin)


def from_disk(source: Path, first: Path, out: Path, device: str) -> str:
    """Rates of the analysis and of plain reads, the page cache without the files and with them."""
    files = [path for folder in (source, first) for path in sorted(folder.glob("*.safetensors"))]
    stored, seconds = sum(path.stat().st_size for path in files), {}
    rates: dict[str, list[float]] = {"cold": [], "warm": []}
    command = ["analyze", "--source", source, "--first", first, "--second", "mxfp4", "--device", device, "--out"]
    for cache in rates:
        for _ in range(2):
            if cache == "cold":
                forget(files)
            rates[cache].append(read_rate(files))
        if cache == "cold":
            forget(files)
        with measuring_on(device, loops=False):
            seconds[cache], _ = workbench(*command, out / f"disk-{cache}")
    line = "; ".join(
        f"{cache}: one thread reads {' and '.join(f'{rate / 1e9:.2f}' for rate in rates[cache])} GB/s, "
        f"{device} analyses {stored / seconds[cache] / 1e9:.2f} GB/s "
        f"({stored / seconds[cache] / max(rates[cache]):.2f})"
        for cache in rates
    )
    print(line, flush=True)
    return line


def compare_sensitivity(source: Path, out: Path, device: str) -> tuple[str, list[str]]:
    from workbench.analysis.tensors import read_frame

    arguments = ["sensitivity", source, "--text", ROOT / "docs" / "formats.md", "--tokens", "64", "--windows", "8"]
    arguments += ["--format", "mxfp4", "--subsets", "0", "--select", "model.layers.[12].mlp.experts.*"]
    frames, seconds = {}, {}
    for where in dict.fromkeys((device, "cpu")):
        seconds[where], _ = workbench(*arguments, "--device", where, "--out", out / f"sensitivity-{where}")
        frames[where] = read_frame(out / f"sensitivity-{where}" / "sensitivity.parquet")
    there, here = frames[device], frames["cpu"]
    wrong = []
    if list(there["case"]) != list(here["case"]):
        wrong.append("sensitivity: other cases")
    off = (there["kl"] - here["kl"]).abs()
    band = KL_ABSOLUTE + KL_RELATIVE * here["kl"]
    wrong += [f"sensitivity: {c}: {a:.6g}, {b:.6g}" for c, a, b, bad in
              zip(here["case"], there["kl"], here["kl"], ~(off <= band), strict=True) if bad]  # fmt: skip
    line = (
        f"sensitivity {len(here)} cases: cpu {seconds['cpu']:.2f} s, {device} {seconds[device]:.2f} s; largest "
        f"difference of KL {off.max():.3g} nats of {here['kl'].max():.3g}, {float((off / band).max()):.2g} of its band"
    )
    print(line, flush=True)
    return line, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    prepare()
    from analysis_memory import generate

    begin = time.perf_counter()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    mini = ROOT / "experiments" / "mini_models" / "mini_kimi"
    lines, wrong = [], check_matrices(arguments.device)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        workbench("quantize", mini, folder / "nvfp4", "--format", "nvfp4", "--dialect", "modelopt")
        warm = compare("first run", mini, folder / "nvfp4", folder / "warm", arguments.device)
        pairs = {"mini-kimi": (mini, folder / "nvfp4")}
        size, shape = (64e6, (512, 2048)) if arguments.tiny else (4e9, (2048, 7168))
        source, first, _ = generate(folder / "large", int(size), *shape)
        pairs["experts"] = (source, first)
        found = [warm, *(compare(name, *pair, folder, arguments.device) for name, pair in pairs.items())]
        found.append((from_disk(source, first, folder, arguments.device), []))
        found.append(compare_sensitivity(mini, folder, arguments.device))
        lines = [line for line, _ in found]
        wrong += [line for _, of in found for line in of]
    for line in wrong[:40]:
        print(f"DIFFERS {line}")
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no card"
    print(f"{card}, torch {torch.__version__}, {torch.get_num_threads()} threads, {time.perf_counter() - begin:.0f} s")
    print("\n".join(lines))
    print(f"{len(wrong)} differences" if wrong else "all columns equal, or within their bands")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
