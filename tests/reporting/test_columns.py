"""Columns of the table of all matrices: what is kept, how finely, and what rebuilds the names; diffs of answers."""

from __future__ import annotations

import base64
import math
import time
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.formats import FORMATS
from workbench.reporting.columns import pack, quantize, unpack
from workbench.reporting.context import FORMAT_BITS
from workbench.reporting.diff import Pieces, diff_answers
from workbench.reporting.tensor_names import EXCEPTION, join_name, split_names
from workbench.reporting.text import visible

SPECIAL = (math.nan, math.inf, -math.inf)


@given(
    st.lists(st.floats(-1e6, 1e6) | st.sampled_from(SPECIAL), min_size=1, max_size=40),
    st.sampled_from((1.0, 0.1, 0.01, 0.0001)),
)
def test_a_value_comes_back_within_half_its_columns_step(values: list[float], step: float) -> None:
    exact = np.array(values)
    packed = pack({"x": (exact, step)})
    kept, (column,) = unpack(packed)["x"], packed["columns"]
    finite = np.isfinite(exact)
    assert np.array_equal(exact[~finite], kept[~finite], equal_nan=True)
    exact, kept = exact[finite], kept[finite]
    if len(exact):
        assert np.abs(exact - kept).max() <= column["step"] * 0.5 + 1e-9
        assert (column["step"] == step) == (np.rint(exact.max() / step) - np.rint(exact.min() / step) <= 65532)


def test_codes_are_as_documented() -> None:
    codes, step, first = quantize(np.array([1.0, 1.01, 3.52, *SPECIAL]), 0.01)
    assert codes.dtype == np.uint8
    assert (codes.tolist(), step, first) == ([0, 1, 252, 255, 254, 253], 0.01, 100)
    codes, step, first = quantize(np.array([1.0, 3.53, *SPECIAL]), 0.01)
    assert codes.dtype == np.uint16
    assert (codes.tolist(), step, first) == ([0, 253, 65535, 65534, 65533], 0.01, 100)
    assert quantize(np.array([0.0, 1e4]), 0.01)[1] == 0.2  # 65,532 steps at the most: the step grows
    packed = pack({"a": (np.array([0.0, 300.0]), 1.0), "b": (np.array([5.0, 6.0]), 1.0)})
    assert zlib.decompress(base64.b64decode(packed["data"])) == bytes([0, 300 & 255, 0, 300 >> 8, 0, 1])
    assert np.isnan(unpack(pack({"x": (np.full(3, np.nan), 0.1)}))["x"]).all()


def test_names_are_patterns_and_exceptions() -> None:
    names = ["m.layers.3.mlp.experts.3.up.weight", "m.layers.4.mlp.experts.17.up.weight", "head.weight", "a.{L}.b.7.w"]
    patterns, codes, exceptions = split_names(names, [3, 4, -1, 7], [3, 17, -1, -1])
    assert patterns == ["m.layers.{L}.mlp.experts.{E}.up.weight", "head.weight"]
    assert codes == [0, 0, 1, EXCEPTION]
    assert exceptions == ["a.{L}.b.7.w"]


@given(st.lists(st.tuples(st.text(".{}LE012a", max_size=12), st.integers(-1, 2), st.integers(-1, 2)), max_size=300))
def test_every_name_is_rebuilt(rows: list[tuple[str, int, int]]) -> None:
    names, layers, experts = ([row[i] for row in rows] for i in range(3))
    patterns, codes, exceptions = split_names(names, layers, experts)  # type: ignore[arg-type]
    left = iter(exceptions)
    rebuilt = [
        next(left) if code == EXCEPTION else join_name(patterns[code], layer, expert)  # type: ignore[arg-type]
        for code, layer, expert in zip(codes, layers, experts, strict=True)
    ]
    assert rebuilt == names


def test_more_patterns_than_codes_become_exceptions() -> None:
    names = [f"name_{i}" for i in range(300)]
    patterns, codes, exceptions = split_names(names, [-1] * 300, [-1] * 300)
    assert len(patterns) == 254
    assert exceptions == [name for name, code in zip(names, codes, strict=True) if code == EXCEPTION]


def test_a_diff_marks_words() -> None:
    shown = diff_answers("There are 3 * 4 = 12 jars.", "There are 3 * 4 = 15 big jars.")
    assert shown.baseline == (("same", "There are 3 * 4 = "), ("gone", "12 "), ("same", "jars."))
    assert shown.candidate == (("same", "There are 3 * 4 = "), ("new", "15 big "), ("same", "jars."))
    assert diff_answers("12", "123").candidate == (("new", "123"),)  # whole words
    assert diff_answers("", "x").baseline == ()
    assert diff_answers("same", "same").baseline == (("same", "same"),)


def _kept(pieces: Pieces) -> str:
    return "".join(text for kind, text in pieces if kind != "cut")


@given(st.text(max_size=200), st.text(max_size=200))
def test_a_short_diff_loses_nothing(one: str, two: str) -> None:
    shown = diff_answers(one, two)
    if len(one) < 190 and len(two) < 190:
        assert _kept(shown.baseline) == one
        assert _kept(shown.candidate) == two


@pytest.mark.parametrize(
    ("one", "two"), [("a " * 500_000, "b " * 500_000), ("x" * 10**6, "y" * 10**6), ("a," * 10**6, "b,")]
)
def test_a_long_answer_is_cut_and_said_so(one: str, two: str) -> None:
    started = time.process_time()
    shown = diff_answers(one, two, limit=1000)
    assert time.process_time() - started < 5
    assert sum(len(text) for _, text in shown.baseline) < 1400
    kind, text = shown.baseline[-1]
    assert kind == "cut"
    left_out = int(text.split()[0].strip("[…").replace(",", ""))
    assert left_out + len(_kept(shown.baseline)) == len(one)


def test_hidden_characters_are_spelled_out() -> None:
    assert visible("a\u202eb\x00c\n\t") == "a⟨U+202E⟩b⟨U+0000⟩c\n\t"
    assert visible("עברית") == "עברית"
    assert visible(3.5) == 3.5


def test_bits_of_formats_are_the_formats_own() -> None:
    assert {name: FORMAT_BITS.get(name) for name in FORMATS} == {name: f.bits for name, f in FORMATS.items()}
