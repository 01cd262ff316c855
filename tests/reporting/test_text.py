"""How figures are written."""

from __future__ import annotations

import math

import pytest

from workbench.reporting.text import (
    cell,
    clip,
    counted,
    detectable,
    interval,
    number,
    probability,
    seconds,
    size,
    small,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (number(20.4375, 2, "dB"), "20.44 dB"),
        (number(-0.001), "0.00"),
        (number(0.001, signed=True), "0.00"),
        (number(-1.5, 1, "pp", signed=True), "−1.5 pp"),
        (number(None), "–"),
        (number(math.nan, 2, "dB"), "–"),
        (number("inf", 2, "dB"), "∞ dB"),
        (interval(0.757, 0.889, 1, 100), "[75.7, 88.9]"),
        (interval(math.nan, math.nan), ""),
        (small(1.9e-4), "1.9e−04"),
        (size(2_400_000_000), "2.2 GiB"),
        (size(None), "–"),
        (seconds(250), "4 min 10 s"),
        (seconds(7500), "2 h 5 min"),
        (seconds(math.inf), "∞ s"),
        (counted(1, "findings"), "1 finding"),
        (counted(2, "findings"), "2 findings"),
        (counted("no", "findings"), "no findings"),
        (counted(1, "matrices"), "1 matrix"),
        (counted(1, "failed requests"), "1 failed request"),
        (detectable({"0.02": 3.18, "0.04": 4.52, "0.08": 6.41}), "3.18 / 4.52 / 6.41"),
        (detectable({"0.02": 26.418, "0.04": 26.42, "0.08": 26.42}), "26.42"),
        (detectable({}), "–"),
        (probability(0.0004), "<0.001"),
        (cell("a|b\n<script>"), "a\\|b &lt;script>"),
        (clip("x" * 30, 10), "xxxxx […20 characters left out…] xxxxx"),
    ],
)
def test_figures_are_written_as_readers_expect(text: str, shown: str) -> None:
    assert text == shown
