"""`workbench bench kernels`: every function gets a row, in the table and in the JSON, and bad sizes end in 3."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from workbench import cli
from workbench.bench import kernels as bench

FUNCTIONS = [
    "nvfp4 quantize (amax)",
    "nvfp4 dequantize",
    "nvfp4 activation",
    *(f"mxfp4 quantize ({rule})" for rule in ("floor", "even", "rceil", "ceil")),
    "mxfp4 dequantize",
    "mxfp4 activation",
]


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_LONG_ENOUGH_S", 0.0)  # one call a measurement


def test_the_command_prints_and_writes_a_row_for_every_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    file = tmp_path / "bench.json"
    size = ["--rows", "32", "--columns", "256", "--threads", "1", "--repeats", "3"]
    assert cli.main(["bench", "kernels", "--device", "cpu", *size, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert [row["function"] for row in found["functions"]] == FUNCTIONS
    assert (found["rows"], found["columns"], found["threads"], found["repeats"]) == (32, 256, 1, 3)
    assert torch.get_num_threads() == threads
    for row in found["functions"]:
        for measured in (row["weights_per_s"], row["of_memcpy"], *row["ratios"].values()):
            assert 0 < measured["low"] <= measured["median"] <= measured["high"]
        assert "reference" in row["ratios"]
    assert found["memcpy_gb_per_s"]["median"] > 0
    printed = capsys.readouterr().out
    assert all(f"\n| {function} | " in printed for function in FUNCTIONS)
    for rival in bench.RIVALS:
        assert (f"{rival}: not installed" in printed) != (f"| times {rival} |" in printed)


def test_a_tool_that_is_not_installed_is_named_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(w: torch.Tensor) -> dict[str, bench.Call]:
        raise ImportError

    monkeypatch.setattr(bench, "_compressed_tensors", missing)
    monkeypatch.setattr(bench, "_torchao", lambda w: {"mxfp4 dequantize": lambda: w.float()})
    monkeypatch.setattr(bench.importlib.metadata, "version", lambda name: "1.2")
    result = bench.bench_kernels(rows=4, columns=32, threads=1, repeats=1)
    assert [s.function for s in result.functions if "torchao" in s.ratios] == ["mxfp4 dequantize"]
    lines = bench.table(result).splitlines()
    assert "compressed-tensors: not installed, not measured" in lines
    assert not any("times compressed-tensors" in line for line in lines)
    assert next(line for line in lines if line.startswith("| nvfp4 dequantize")).split("|")[3].strip() == "-"


@pytest.mark.parametrize("size", [["--columns", "48"], ["--rows", "0"], ["--threads", "-1"], ["--repeats", "0"]])
def test_sizes_that_cannot_be_measured_end_in_3(size: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "kernels", *size]) == 3
    assert "cannot be measured" in capsys.readouterr().err
