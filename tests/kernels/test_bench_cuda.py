"""`workbench bench kernels --device cuda` without a card: kernels interpreted, the clock replaced, the tables real."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", minversion="3.9", reason="older interpreters round a fused multiply-add twice")
from triton_interpreter import interpreted

from workbench.bench import cuda_products, cuda_rivals, cuda_streams, cuda_timing
from workbench.bench.cuda_table import CudaBench, Figure, Row, Section, as_json, markdown, of_copy, summary, text, times
from workbench.bench.cuda_timing import EVENTS, GRAPH, Card, Timed

CARD = Card(name="card", torch="2", triton="3", copy_call=4e12, copy_kernel=3e12, matrix_flops=8e14)


def clock(calls: Sequence[Callable[[], object]], *, capture: bool = True) -> Timed:
    """Runs the first call; a microsecond each."""
    try:
        calls[0]()
    except Exception as error:
        return Timed(why=cuda_timing.reason(error))
    return Timed(seconds=1e-6, how=GRAPH if capture else EVENTS)


def made(make: Callable[[], Sequence[Callable[[], object]]], *, capture: bool = True) -> Timed:
    try:
        return clock(make(), capture=capture)
    except Exception as error:
        return Timed(why=cuda_timing.reason(error))


def absent(*arguments: object) -> Any:
    raise ImportError("not on this machine")


@contextmanager
def faked(module: Any) -> Iterator[None]:
    """Without the rivals: what they cost is not asked here, and importing them takes long."""
    rivals = [name for name in dir(cuda_rivals) if name.startswith(("Marlin", "fused_", "torchao", "compressed_"))]
    with (
        mock.patch.multiple(module, measure=clock, measure_made=made),
        mock.patch.multiple(cuda_rivals, **dict.fromkeys(rivals, absent)),
    ):
        yield


@pytest.mark.slow
@interpreted
def test_every_stream_runs_and_carries_its_bar() -> None:
    with faked(cuda_streams), mock.patch.object(cuda_streams, "_COPIES", 1):
        section = cuda_streams.measure_streams(CARD, 1, 32, "cpu")
    rows = {row.case: row for row in section.rows}
    assert all(row.ours.seconds for row in section.rows), [row.ours.why for row in section.rows]
    assert set(rows) == {
        "largest magnitude (2.00 B)",
        "nvfp4 quantize (2.56 B)",
        "nvfp4 quantize four_over_six (2.56 B)",
        *(f"mxfp4 quantize {rule} (2.53 B)" for rule in ("floor", "even", "rceil", "ceil", "mse")),
        "nvfp4 decode bf16 (2.56 B)",
        "nvfp4 decode bf16, a global a row (2.56 B)",
        "nvfp4 decode f32 (4.56 B)",
        "mxfp4 decode bf16 (2.53 B)",
        "nvfp4 activation, static (4.00 B)",
        "nvfp4 activation, by token (4.00 B)",
        "mxfp4 activation (4.00 B)",
        "nvfp4 to mxfp4 (1.09 B)",
        "error sums (2.56 B)",
        "error sums, moments, attributions (2.56 B)",
    }
    bars = {case: row.figures["of copy"].needed for case, row in rows.items()}
    assert [case for case, bar in bars.items() if bar is None] == [
        "largest magnitude (2.00 B)",
        "nvfp4 quantize four_over_six (2.56 B)",
        "mxfp4 quantize mse (2.53 B)",
    ]
    assert (bars["nvfp4 to mxfp4 (1.09 B)"], bars["error sums (2.56 B)"]) == (0.7, 0.6)
    assert bars["error sums, moments, attributions (2.56 B)"] == 0.3
    assert rows["mxfp4 activation (4.00 B)"].figures["of copy"].value == pytest.approx(4 * 32 / 1e-6 / 4e12)
    two_steps = rows["nvfp4 to mxfp4 (1.09 B)"].figures["x by way of bf16"]
    assert (two_steps.value, two_steps.needed, two_steps.met) == (1.0, 3.5, False)
    eager = rows["mxfp4 decode bf16 (2.53 B)"].figures["x compressed-tensors"]
    assert (eager.value, eager.needed, eager.why) == (None, 10.0, "ImportError: not on this machine")
    assert rows["nvfp4 quantize (2.56 B)"].figures["x torchao"].needed == 1.2


@pytest.mark.slow
@interpreted
def test_products_carry_their_bars_and_a_missing_rival_its_reason() -> None:
    small = mock.patch.multiple(cuda_products, rotations=lambda _: 3, FEW_TOKENS=1, MANY_TOKENS=3)
    with faked(cuda_products), small:
        section = cuda_products.measure_linear(CARD, 64, (1, 2, 3), "cpu")
    rows = {row.case: row for row in section.rows}
    assert len(rows) == 3 * 4
    assert all(row.ours.seconds for row in section.rows), [row.ours.why for row in section.rows]
    needed = {case: {name: figure.needed for name, figure in row.figures.items()} for case, row in rows.items()}
    assert needed["M=1 nvfp4 W4A16"] == {"x cuBLAS bf16": 1.6, "x Marlin": 1.0, "of copy": None}
    assert needed["M=2 mxfp4 W4A16"] == {"x cuBLAS bf16": None, "x Marlin": None}
    assert needed["M=3 mxfp4 W4A16"] == {"x cuBLAS bf16": 0.85, "x Marlin": None, "of bf16 rate": None}
    assert needed["M=1 mxfp4 W4A4"] == {"x cuBLAS bf16": None}
    assert rows["M=1 nvfp4 W4A16"].figures["x Marlin"].why == "ImportError: not on this machine"


def test_the_bars_stand_at_the_sizes_they_were_set_for() -> None:
    assert (cuda_products.FEW_TOKENS, cuda_products.MANY_TOKENS) == (16, 2048)
    assert (cuda_products.FEW_ROUTED, cuda_products.MANY_ROUTED) == (4, 4096)


@pytest.mark.slow
@interpreted
def test_experts_take_others_each_call_and_carry_their_bars() -> None:
    with faked(cuda_products), mock.patch.object(cuda_products, "rotations", return_value=3):
        section = cuda_products.measure_experts(CARD, 8, 64, 32, 2, (1, 16), "cpu")
    one, _, many, _ = section.rows
    assert all(row.ours.seconds for row in section.rows), [row.ours.why for row in section.rows]
    assert [row.case for row in section.rows] == [
        "1 tokens W4A16",
        "1 tokens W4A4",
        "16 tokens W4A16",
        "16 tokens W4A4",
    ]
    assert (one.figures["x decoding all"].needed, one.figures["x fused bf16"].needed) == (10.0, 1.0)
    assert (many.figures["x decoding all"].needed, many.figures["x fused bf16"].needed) == (None, None)
    first, second, third, fourth = (ids for _, ids in cuda_products._routings(1, 2, 8, 4, "cpu"))
    assert sorted(torch.cat((first, second, third, fourth)).flatten().tolist()) == list(range(8))
    weights, ids = cuda_products._routings(4, 3, 8, 1, "cpu")[0]
    assert all(len(set(row)) == 3 for row in ids.tolist())
    assert torch.allclose(weights.sum(-1), torch.ones(4))


@interpreted
def test_the_copy_kernel_copies() -> None:
    source = torch.arange(5000, dtype=torch.int32)
    target = torch.zeros_like(source)
    cuda_timing.copy_with_kernel(source, target)
    assert torch.equal(source, target)


def test_a_rival_that_computes_something_else_is_not_timed() -> None:
    ours = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    cuda_rivals._check_alike(ours * 1.01, ours)
    with pytest.raises(cuda_rivals.DifferentResult, match="of ours away"):
        cuda_rivals._check_alike(ours.flip(0), ours)
    with pytest.raises(cuda_rivals.DifferentResult):
        cuda_rivals._check_alike(ours * float("nan"), ours)


def test_what_no_graph_captures_is_timed_call_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(calls: object) -> float:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cuda_timing, "graph_seconds", refuses)
    monkeypatch.setattr(cuda_timing, "event_seconds", lambda calls: 2e-6)
    assert cuda_timing.measure([lambda: None]) == Timed(seconds=2e-6, how=EVENTS)

    def broken() -> None:
        raise ValueError("\n no such shape\nand more")

    assert cuda_timing.measure([broken]) == Timed(why="ValueError: no such shape")
    assert cuda_timing.measure_made(lambda: [][1]).why.startswith("IndexError")  # type: ignore[misc]


def test_inputs_are_rotated_beyond_four_caches() -> None:
    for nbytes in (1e6, 36e6, 134e6, 5e9):
        assert (cuda_timing.rotations(nbytes) - 1) * nbytes >= 4 * 50 * 2**20
    assert cuda_timing.rotations(5e9) == 3


def test_tables_show_bars_reasons_and_how_time_was_taken() -> None:
    ours, slow = Timed(seconds=1e-6, how=GRAPH), Timed(seconds=2e-6, how=EVENTS)
    missing = Timed(why="ModuleNotFoundError: No module named 'vllm'")
    rows = (
        Row(
            case="a",
            ours=ours,
            figures={
                "of copy": of_copy(ours, 2e6, CARD, 0.75),
                "x eager": times(ours, slow, 1.5),
                "x Marlin": times(ours, missing, 1.0),
            },
        ),
        Row(case="b", ours=missing, figures={"of copy": of_copy(missing, 2e6, CARD, 0.75)}),
        Row(case="c", ours=ours, figures={"x Marlin": times(ours, missing)}),
    )
    result = CudaBench(date="2026-01-02", card=CARD, sections=(Section(name="s", title="Some", rows=rows),))
    lines = text(result.sections[0]).splitlines()
    assert " ".join(lines[2].split()) == "a 1.0 0.50 (>= 0.75 NOT MET) 2.00* (>= 1.5 met) - (>= 1 not measured)"
    assert [line for line in lines if "No module named" in line] == [
        "  x Marlin, a: ModuleNotFoundError: No module named 'vllm'",
        "  b: ModuleNotFoundError: No module named 'vllm'",
    ]
    assert lines[-1].startswith("  * could not be captured")
    assert summary(result.sections) == "1 of 4 bars met; not met: a of copy; not measured: a x Marlin, b of copy"
    assert "| a | 1.0 | 0.50 (>= 0.75 NOT MET) | 2.00* (>= 1.5 met) | - (>= 1 not measured) |" in markdown(result)
    data = json.loads(json.dumps(as_json(result)))
    assert data["card"]["copy"] == 4e12
    assert data["sections"][0]["rows"][0]["figures"]["of copy"]["met"] is False
    assert str(Figure(value=10.0)) == "10.0"
    assert str(Figure(value=9.994)) == "9.99"
