"""The command's pass: what is broken is named and the rest analyzed, samples, selections, no source, kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from workbench.analysis.gemm import GemmArm
from workbench.analysis.study import analyze_checkpoints
from workbench.analysis.summary import AnalysisSummary
from workbench.analysis.tensors import ArmPair
from workbench.cli import main
from workbench.errors import ConfigError
from workbench.formats import quantize
from workbench.progress import Progress
from workbench.records import read_json

from .analysis_memory import generate, peak
from .trio_checkpoints import MODULES, Trio, write_checkpoint

EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"


def run(trio: Trio, out: Path, **changes: object) -> AnalysisSummary:
    pair = ArmPair(first=trio.nvfp4, first_arm="first", second_arm="second")
    settings = {"source": trio.source, "pair": pair, "bootstrap": 50}
    return analyze_checkpoints(out=out, **(settings | changes))  # type: ignore[arg-type]


def with_weights(trio: Trio, folder: Path, **changed: torch.Tensor | None) -> Path:
    weights = dict(trio.weights)
    for key, value in changed.items():
        name = key.replace("__", ".")
        weights.pop(name)
        if value is not None:
            weights[name] = value
    write_checkpoint(folder, weights)
    return folder


def key(name: str) -> str:
    return name.replace(".", "__")


def test_every_fault_is_named_and_the_rest_is_analyzed(
    trio: Trio, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {kind: EXPERT.format(e, p) for kind, (e, p) in {
        "non-finite": (0, "gate"), "all-zero": (0, "up"), "missing": (1, "gate"), "shape": (1, "up"),
        "unrelated": (2, "gate"),
    }.items()}  # fmt: skip
    broken = trio.weights[names["non-finite"]].clone()
    broken[3, 5] = float("nan")
    other = torch.randn(32, 64, generator=torch.Generator().manual_seed(9)).bfloat16()
    source = with_weights(
        trio,
        tmp_path / "broken",
        **{
            key(names["non-finite"]): broken,
            key(names["all-zero"]): torch.zeros(32, 64, dtype=torch.bfloat16),
            key(names["missing"]): None,
            key(names["shape"]): torch.ones(16, 64, dtype=torch.bfloat16),
            key(names["unrelated"]): other,
        },
    )
    out = tmp_path / "out"
    code = main(
        ["analyze", "--source", str(source), "--first", str(trio.nvfp4), "--bootstrap", "50", "--out", str(out)]
    )
    assert code == 2
    shown = capsys.readouterr().out
    summary = read_json(AnalysisSummary, out / "analysis.json")
    assert summary.fault_counts == dict.fromkeys(["missing", "shape", "non-finite", "all-zero", "unrelated"], 1)
    assert {f.kind: f.tensor for f in summary.faults} == names
    for kind, name in names.items():
        assert f"{kind}: 1 matrices" in shown
        assert name in shown
    frame = pd.read_parquet(out / "tensors.parquet")
    whole = run(trio, tmp_path / "whole")
    assert whole.faults == ()
    good = pd.read_parquet(tmp_path / "whole" / "tensors.parquet")
    gone = {names[kind] for kind in ("missing", "shape", "non-finite")}
    assert set(frame["name"]) == {f"{m}.weight" for m in MODULES} - gone
    untouched = ~good["name"].isin(names.values())
    both = frame.merge(good[untouched], on="name", suffixes=("", "_good"))
    assert len(both) == len(MODULES) - 5
    assert (both["sqnr_total_db"] == both["sqnr_total_db_good"]).all()


def test_odd_shapes_are_named_and_the_rest_is_analyzed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Empty matrices, and a K that the first's block divides and the second's does not."""
    shapes = {"good": (32, 64), "no rows": (0, 64), "K = 48": (32, 48), "no columns": (32, 0), "one row": (1, 32)}
    generator = torch.Generator().manual_seed(0)
    source, first, names = {}, {}, {}
    for index, (what, shape) in enumerate(shapes.items()):
        name = names[what] = EXPERT.format(index, "gate")
        w = source[name] = (0.05 * torch.randn(*shape, generator=generator)).bfloat16()
        n, k = shape
        codes, scales = torch.empty(n, k // 2, dtype=torch.uint8), torch.empty(n, k // 16).to(torch.float8_e4m3fn)
        multiplier = torch.tensor(1.0)
        if w.numel():
            q = quantize(w, "nvfp4")
            assert q.global_scale is not None
            codes, scales, multiplier = q.codes, q.block_scales, q.global_scale.reshape(()).clone()
        first |= {name: codes, f"{name}_scale": scales, f"{name}_scale_2": multiplier}
    write_checkpoint(tmp_path / "source", source)
    write_checkpoint(tmp_path / "first", first, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []})
    out = tmp_path / "out"
    products = ["--products", "gaussian", "--bootstrap", "2"]
    assert main(["analyze", str(tmp_path / "source"), str(tmp_path / "first"), "--out", str(out), *products]) == 2
    summary = read_json(AnalysisSummary, out / "analysis.json")
    assert {f.tensor: f.kind for f in summary.faults} == dict.fromkeys(
        (names[what] for what in ("no rows", "K = 48", "no columns")), "format"
    )
    for table in ("tensors", "gemm"):
        assert set(pd.read_parquet(out / f"{table}.parquet")["name"]) == {names["good"], names["one row"]}
    shown = capsys.readouterr().out
    assert f"{names['no rows']} is empty (shape (0, 64))" in shown
    assert f"{names['K = 48']} K = 48 is not a multiple" in shown


def test_a_source_of_another_model_is_said_to_be_one(trio: Trio, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(7)
    write_checkpoint(
        tmp_path / "other", {n: torch.randn(w.shape, generator=generator).bfloat16() for n, w in trio.weights.items()}
    )
    summary = run(trio, tmp_path / "out", source=tmp_path / "other")
    assert summary.fault_counts == {"unrelated": len(MODULES)}
    assert "another model's" in summary.faults[0].message


def test_clean_checkpoints_end_in_zero_and_a_manifest(trio: Trio, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "out"
    assert main(["analyze", str(trio.source), str(trio.nvfp4), "--bootstrap", "50", "--out", str(out)]) == 0
    assert sorted(p.name for p in out.iterdir()) == [
        "analysis.json", "fused.parquet", "manifest.json", "pooled.parquet", "tensors.parquet",
    ]  # fmt: skip
    assert "GB/s" in capsys.readouterr().out
    assert json.loads((out / "manifest.json").read_text())["stage_seconds"]["analyze"] > 0


def test_progress_says_how_fast_it_reads_and_how_long_it_will_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two matrices were there before, one of 3 GB takes 2 s: seven more will take 14 s."""
    now = [0.0]
    monkeypatch.setattr("workbench.progress.time.monotonic", lambda: now[0])
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    reading = Progress().reading()
    for done, _ in enumerate(reading.bar(range(10), 10, "weights")):
        if done == 2:
            now[0] += 2.0
            reading.add(3_000_000_000)
        if done == 3:
            break
    shown = capsys.readouterr().out.split("\r")[-1]
    assert shown == "[00:02]   weights: 3 of 10, 1.50 GB/s, 0:00:14 left"


def test_without_a_source_what_needs_only_a_and_b(trio: Trio, tmp_path: Path) -> None:
    summary = run(trio, tmp_path / "half", source=None)
    run(trio, tmp_path / "whole")
    half, whole = (pd.read_parquet(tmp_path / n / "tensors.parquet") for n in ("half", "whole"))
    assert summary.missing == "source,direct"  # direct is made from the source
    assert set(half["missing"]) == {"source,direct"}
    of_both = [
        "power_first", "power_e2", "sqnr_second_db", "corr_e2_a", "e2_mean", "e2_std", "e2_skewness",
        "e2_excess_kurtosis", "scale_phase", "second_error_scale", "second_error_element", "second_saturated",
        "e2_code_asymmetry",
    ]  # fmt: skip
    for column in of_both:
        np.testing.assert_allclose(half[column], whole[column], rtol=1e-9, atol=1e-14, err_msg=column)
    for column in ("power_source", "sqnr_first_db", "sqnr_total_db", "corr_e1_e2", "gain_total", "first_error_scale"):
        assert half[column].isna().all(), column
    pooled = pd.read_parquet(tmp_path / "half" / "pooled.parquet")
    assert pooled["sqnr_second_db"].notna().all()
    assert pooled["sqnr_total_db"].isna().all()


def test_a_sample_estimates_the_whole_within_its_interval(trio: Trio, tmp_path: Path) -> None:
    summary = run(trio, tmp_path / "some", sample=4)
    assert summary.of == len(MODULES)
    assert summary.measured < len(MODULES)
    run(trio, tmp_path / "all")
    some, whole = (pd.read_parquet(tmp_path / n / "tensors.parquet") for n in ("some", "all"))
    strata = whole.groupby(["projection", "shared_expert"]).size()
    got = some.groupby(["projection", "shared_expert"])["sample_weight"].sum()
    assert (got == strata).all()  # every stratum is there, and stands for all of itself
    a, b = (pd.read_parquet(tmp_path / n / "pooled.parquet").iloc[0] for n in ("some", "all"))
    assert a["of"] == b["matrices"]
    assert a["weights"] == b["weights"]
    assert a["sqnr_total_db"] == pytest.approx(b["sqnr_total_db"], abs=0.3)


def test_a_selection_looks_at_its_names_only(trio: Trio, tmp_path: Path) -> None:
    summary = run(trio, tmp_path / "out", select="*experts.2.*")
    assert summary.measured == 2
    assert set(pd.read_parquet(tmp_path / "out" / "tensors.parquet")["expert"]) == {2}
    with pytest.raises(ConfigError, match="matches no quantized matrix"):
        run(trio, tmp_path / "none", select="nothing*")


def test_a_folder_of_another_analysis_is_refused(trio: Trio, tmp_path: Path) -> None:
    run(trio, tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    run(trio, tmp_path / "out")
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
    with pytest.raises(ConfigError, match="another --out"):
        run(trio, tmp_path / "out", seed=1)
    arms = [GemmArm(arm="first", checkpoint=trio.nvfp4)]
    run(trio, tmp_path / "out", arms=arms)
    with pytest.raises(ConfigError, match=r"other .*settings \(gemm.parquet\)"):
        run(trio, tmp_path / "out", arms=arms, moments=True)


KILLED = """
import sys, time
from pathlib import Path
from workbench.analysis import tensors
from workbench.cli import main
add = tensors.Journal.add
def slow(self, *rest):
    add(self, *rest)
    print("done", flush=True)
    time.sleep(0.05)
tensors.Journal.add = slow
sys.exit(main(["analyze", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_killed_again_and_again_it_ends_in_the_same_bytes(trio: Trio, tmp_path: Path) -> None:
    arguments = ["--source", str(trio.source), "--first", str(trio.nvfp4), "--bootstrap", "50", "--out"]
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert main(["analyze", *arguments, str(whole)]) == 0
    kills = int(os.environ.get("WORKBENCH_KILLS", "2"))
    rng = np.random.default_rng(0)
    for _ in range(kills):
        command = [sys.executable, "-c", KILLED, *arguments, str(out)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for line in child.stdout:
            if line == "done\n":
                break
        time.sleep(float(rng.uniform(0, 0.15)))
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert main(["analyze", *arguments, str(out)]) == 0
    for path in whole.iterdir():
        if path.name != "manifest.json":
            assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    assert not list(out.glob(".*journal"))


@pytest.mark.slow
def test_peak_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """Matrices of 2 MiB; eight times as many of them (32 MiB, 256 MiB of source) take less than two matrices more."""
    found = []
    for size in (32, 256):
        source, first, _ = generate(tmp_path / str(size), size << 20, rows=512, columns=2048)
        bytes_, _, code = peak(source, first, tmp_path / f"out{size}", "--bootstrap", "2")
        assert code == 0
        found.append(bytes_)
    assert found[1] - found[0] < 24 << 20, found
