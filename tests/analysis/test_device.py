"""Plain torch, which a GPU's values take, against the compiled loops; and the device as a setting.

Both measure the same sides on the CPU: `chunks.on_loops` decides, and is switched here.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from workbench.kernels import cpu_errors, torch_errors

from workbench.analysis import chunks, sides
from workbench.analysis.algebra import Sides, measure_sides
from workbench.analysis.device import Device, check_device
from workbench.analysis.reading import work_ahead
from workbench.analysis.sides import DenseSide
from workbench.analysis.tensors import ArmPair, analyze_weights
from workbench.checkpoints import open_checkpoint
from workbench.cli import main
from workbench.errors import ConfigError

from .device_cases import cases, chain_of, different, magnitudes, stored, values
from .table_bands import compare_tables
from .trio_checkpoints import Trio


@pytest.fixture
def on_torch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(chunks, "on_loops", lambda device: False)


@pytest.mark.parametrize("case", cases())
def test_torch_measures_what_the_loops_do(case: str, on_torch: Callable[[], None]) -> None:
    make = cases()[case]
    want = measure_sides(make())
    terms = magnitudes(make())
    on_torch()
    for elements in (None, 1 << 18, 4096):
        assert different(measure_sides(make(), elements=elements), want, terms) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_named_alike(bad: float, on_torch: Callable[[], None]) -> None:
    w = values(300, 1024)
    first = stored(w, "nvfp4")
    w[250, 7] = bad
    want = measure_sides(chain_of(w, first))
    assert want.nonfinite[0] == "source"
    on_torch()
    found = measure_sides(chain_of(w, first))
    assert found.nonfinite == want.nonfinite
    assert found.worst == want.worst == ()


def test_units_begin_anew_with_every_run() -> None:
    """Taken together or apart: the same units, also where a unit does not divide a run and the last run is short."""
    w, a, b, d = (values(7 * 640 + 96, seed=seed) for seed in range(4))
    apart = [
        torch_errors.error_sums(*(t[start : start + 640] for t in (w, a, b, d)), unit=256)
        for start in range(0, len(w), 640)
    ]
    for piece in (1 << 20, 512):
        together = torch_errors.error_sums(w, a, b, d, unit=256, run=640, piece=piece)
        assert together.shape == (7 * 3 + 1, len(cpu_errors.SUMS))
        torch.testing.assert_close(together, torch.cat(apart), rtol=1e-12, atol=1e-15)


def test_the_first_of_equal_blocks_is_the_worst(on_torch: Callable[[], None]) -> None:
    w = torch.full((64, 4096), 0.3)
    first, second = DenseSide(w, block=32), DenseSide(torch.full((64, 4096), 0.25), block=32)
    places = [(0, 0), (0, 32), (0, 64)]
    for switch in (lambda: None, on_torch):
        switch()
        found = measure_sides(Sides(source=first, first=None, second=second), elements=1 << 20)
        assert [(b.row, b.column) for b in found.worst] == places


def test_every_column_of_the_table_is_equal(trio: Trio, on_torch: Callable[[], None], tmp_path: Path) -> None:
    pairs = [ArmPair(first=trio.nvfp4, first_arm="nvfp4", second_arm="requant")]
    pairs.append(ArmPair(first=trio.nvfp4, first_arm="nvfp4", second_arm="mxfp4", second=trio.mxfp4, second_rule=""))
    want = analyze_weights(source=trio.source, pairs=pairs)
    on_torch()
    found = analyze_weights(source=trio.source, pairs=pairs, journal=tmp_path / "journal")
    assert compare_tables(found, want) == []
    assert found.attrs["error_density"] == want.attrs["error_density"]
    changed = found.copy()
    changed.loc[3, "sqnr_total_db"] *= 1 + 1e-9
    changed.loc[2, "worst_block_column"] += 32
    assert {line.split(":")[0] for line in compare_tables(changed, want)} == {"worst_block_column", "sqnr_total_db"}


def test_several_matrices_at_once_are_one_table(
    trio: Trio, on_torch: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [ArmPair(first=trio.nvfp4, first_arm="nvfp4", second_arm="requant")]
    on_torch()
    one = analyze_weights(source=trio.source, pairs=pairs)
    monkeypatch.setattr(Device, "workers", 3)
    pd.testing.assert_frame_equal(analyze_weights(source=trio.source, pairs=pairs), one)


def test_work_ahead_keeps_the_order_and_hands_errors_on() -> None:
    def work(item: int) -> int:
        if item == 7:
            raise ValueError("seven")
        time.sleep(0.01 * (item % 3))
        return item * item

    assert list(work_ahead(range(7), work, 3)) == [n * n for n in range(7)]
    done = work_ahead(range(100), work, 3)
    assert [next(done) for _ in range(7)] == [n * n for n in range(7)]
    with pytest.raises(ValueError, match="seven"):
        next(done)


def test_a_journal_is_continued_on_the_device_that_began_it(
    trio: Trio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other last bits are another journal: a pass on a GPU takes no row of the processor's, nor the other way."""
    pairs, journal = [ArmPair(first=trio.nvfp4, first_arm="nvfp4", second_arm="requant")], tmp_path / "journal"
    reads: list[int] = []

    def run() -> pd.DataFrame:
        reads.clear()
        return analyze_weights(source=trio.source, pairs=pairs, journal=journal, read_bytes=reads.append)

    first = run()
    assert len(reads) == len(first)
    run()
    assert not reads
    monkeypatch.setattr(chunks, "on_loops", lambda device: False)
    other = run()
    assert len(reads) == len(first)
    assert other.attrs["inputs"] == first.attrs["inputs"] | {"device": "cpu"}
    run()
    assert not reads


def test_memory_that_does_not_suffice_makes_chunks_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    device, tried = Device(), []

    def work(elements: int) -> int:
        tried.append(elements)
        if elements > 1 << 20:
            raise torch.OutOfMemoryError("no room")
        return elements

    assert device.with_less(work, "w") == 1 << 20
    assert tried == [1 << 24, 1 << 22, 1 << 20]
    assert device.with_less(work, "w") == 1 << 20  # and stays there
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 4 * 10**9))

    def never(elements: int) -> int:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(ConfigError, match=r"experts.3: cpu has no memory for it \(1.0 of 4.0 GB free\)") as raised:
        device.with_less(never, "experts.3")
    assert "--device cpu" in raised.value.fix
    assert device.elements == sides.CHUNK_ELEMENTS


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_a_device_that_is_not_there_is_named(
    trio: Trio, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["analyze", str(trio.source), str(trio.nvfp4), "--out", str(tmp_path / "out"), "--device", "cuda"]
    assert main(arguments) == 3
    shown = capsys.readouterr()
    assert "sees no GPU" in shown.out + shown.err
    assert "--device cpu" in shown.out + shown.err
    for name in ("gpu", "cuda:", "cuda:-1", "cpu:0", ""):
        with pytest.raises(ConfigError, match="none that is known"):
            check_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="sees 1 GPUs"):
        check_device("cuda:1")


def test_the_manifest_says_where_it_was_measured(trio: Trio, tmp_path: Path) -> None:
    assert main(["analyze", str(trio.source), str(trio.nvfp4), "--out", str(tmp_path)]) == 0
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert (manifest["device"], manifest["device_peak_bytes"]) == ("cpu", 0)


def test_what_is_moved_to_a_device_decodes_alike(trio: Trio) -> None:
    """`with_parts` moves all that values need: through a copy of each part, the values stay."""
    with open_checkpoint(trio.nvfp4) as checkpoint:
        tensor = checkpoint.read(checkpoint.entries()[-1].name)
    moved = sides.with_parts(tensor, lambda part: part.clone())
    assert moved.codes.data_ptr() != tensor.codes.data_ptr()
    assert torch.equal(moved.effective(), tensor.effective())
    assert dataclasses.replace(moved, codes=tensor.codes).shape == tensor.shape
