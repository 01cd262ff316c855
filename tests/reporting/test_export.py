"""Figures for papers: complete, sharp, readable by everyone, with captions that say where they come from."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from workbench.errors import ConfigError, OutputError
from workbench.records import Comparison, Verdict, read_json, write_json
from workbench.records.judged import evidence_digests
from workbench.reporting.export import render, write_figures
from workbench.reporting.export_answers import draw_answers
from workbench.reporting.export_style import COLORS, STYLE
from workbench.reporting.export_weights import draw_weights
from workbench.reporting.load import load_run

from .test_serving_cost import cost

NAMES = {
    "scores", "losses", "sqnr_by_projection", "sqnr_by_depth", "correlation", "density", "scale_phase", "predicted",
    "attribution", "output_noise", "coherence_gain", "load_time", "latency",
}  # fmt: skip


@pytest.fixture(scope="module")
def run(sample_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample run with a serving cost, judged as it lies there."""
    folder = tmp_path_factory.mktemp("export") / "run"
    shutil.copytree(sample_run, folder)
    write_json(folder / "serving_cost.json", cost())
    verdict, comparison = (read_json(kind, folder / f"{kind.__name__.lower()}.json") for kind in (Verdict, Comparison))
    write_json(folder / "verdict.json", dataclasses.replace(verdict, judged=evidence_digests(folder, comparison)))
    return folder


@pytest.fixture(scope="module")
def written(run: Path) -> list[Path]:
    return write_figures(run, run.parent / "figures")


def test_every_figure_is_written_as_png_and_svg_with_one_caption_file(run: Path, written: list[Path]) -> None:
    assert written[-1] == run.parent / "figures" / "figures.md"
    assert {(p.stem, p.suffix) for p in written[:-1]} == {(n, e) for n in NAMES for e in (".png", ".svg")}


def test_png_have_300_dots_an_inch_on_white(written: list[Path]) -> None:
    for path in (p for p in written if p.suffix == ".png"):
        with Image.open(path) as image:
            assert image.info["dpi"] == pytest.approx((300, 300), abs=0.1), path.name
            width, height = image.size
            corners = [(0, 0), (width - 1, 0), (0, height - 1), (width - 1, height - 1)]
            shown = image.convert("RGB")
            assert {shown.getpixel(corner) for corner in corners} == {(255, 255, 255)}, path.name
            assert len(shown.reduce(8).getcolors(1 << 20)) > 20, path.name
        assert width >= 900, path.name  # a column of a paper


def test_svg_keep_text_as_text_with_units_and_n(written: list[Path]) -> None:
    units = re.compile(r"\bdB\b|%|percentage points|\bs\b|corr\(|rms|times source|times offline")
    for path in (p for p in written if p.suffix == ".svg"):
        tree = ElementTree.parse(path)
        texts = ["".join(node.itertext()) for node in tree.iter("{http://www.w3.org/2000/svg}text")]
        assert re.search(r"\bn = [\d,]+", " ".join(texts)) or " n repeats" in " ".join(texts), (path.name, texts)
        assert units.search(" ".join(texts)), (path.name, texts)


def test_captions_name_record_files_and_commands(run: Path, written: list[Path]) -> None:
    text = written[-1].read_text()
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["command"][-2] in text
    assert f"workbench report {run} --figures {written[-1].parent}\n" in text
    sections = text.split("\n## ")[1:]
    assert len(sections) == len(NAMES)
    for section in sections:
        sources = re.findall(r"`([^`]+)`", section.partition("Drawn from ")[2])
        assert sources
        assert all((run / source).exists() for source in sources), section


def test_the_same_records_make_the_same_files(run: Path, written: list[Path]) -> None:
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
        figures = list(draw_answers(load_run(run)))
        for figure in figures:
            for ending in ("png", "svg"):
                before = next(path for path in written if path.name == f"{figure.name}.{ending}")
                assert render(figure, ending) == before.read_bytes(), before.name
    assert len(figures) == 4


def test_what_is_drawn_is_what_the_records_hold(run: Path) -> None:
    files = load_run(run)
    figures = {figure.name: figure.figure for figure in (*draw_answers(files), *draw_weights(files))}
    tensors = pd.read_parquet(run / "tensors.parquet")
    assert files.comparison is not None

    drawn = [line.get_xdata()[0] for line in figures["losses"].axes[0].lines if line.get_marker() not in ("|", "None")]
    assert sorted(drawn) == pytest.approx(sorted(t.loss_pp for t in files.comparison.tasks))
    limits = [tuple(line.get_xdata()) for line in figures["losses"].axes[0].lines if line.get_color() == "black"]
    assert (10.0, 10.0) in limits  # the policy's margin

    measured = np.concatenate([np.asarray(c.get_offsets()) for c in figures["predicted"].axes[0].collections])
    assert sorted(measured[:45, 1]) == pytest.approx(sorted(tensors["sqnr_total_db"]))
    assert sorted(measured[:45, 0]) == pytest.approx(sorted(tensors["sqnr_total_predicted_quadrature_db"]))

    (bars, *_) = (figures["correlation"].axes[0].patches,)
    assert sum(bar.get_height() for bar in bars) == len(tensors)

    for axes, which, power in zip(figures["attribution"].axes, ("first", "second"), ("e1", "e2"), strict=True):
        by_row: dict[float, float] = {}
        for bar in axes.patches:
            by_row[round(bar.get_y(), 3)] = by_row.get(round(bar.get_y(), 3), 0.0) + bar.get_width()
        assert list(by_row.values()) == pytest.approx([100.0] * len(by_row))
        down = tensors[tensors["projection"] == "down_proj"]
        size = down["rows"] * down["columns"]
        share = 100 * (down[f"{which}_error_element"] * size).sum() / (down[f"power_{power}"] * size).sum()
        assert any(bar.get_width() == pytest.approx(share) for bar in axes.patches)


def test_colours_are_apart_for_every_kind_of_colour_vision() -> None:
    """Machado, Oliveira, Fernandes 2009, severity 1.0: protanopia, deuteranopia, tritanopia; distances in CIELAB."""
    kinds = {
        "usual": np.eye(3),
        "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.00388, -0.0481, 1.051998]],
        "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.0118, 0.0429, 0.968881]],
        "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
    }  # fmt: skip
    srgb = np.array([[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in COLORS])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    for name, kind in kinds.items():
        xyz = np.clip(linear @ np.array(kind).T, 0, 1) @ to_xyz.T / [0.9505, 1.0, 1.089]
        f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
        lab = np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], axis=1)
        least = min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(lab, 2))
        assert least > 10, (name, least)


def test_several_pairs_have_figures_of_their_own(sample_run: Path) -> None:
    files = load_run(sample_run)
    assert files.tensors is not None
    tensors = files.tensors.copy()
    tensors.attrs = {}
    files.tensors = pd.concat([tensors, tensors.assign(second_rule="ceil/../up")], ignore_index=True)
    names = [figure.name for figure in draw_weights(files)]
    assert len(names) == len(set(names))
    assert "predicted-nvfp4-nvfp4_to_mxfp4-even" in names
    assert "predicted-nvfp4-nvfp4_to_mxfp4-ceil-..-up" in names  # stays in its folder


def test_a_ratio_is_of_the_repeats_that_it_was_made_of(sample_run: Path) -> None:
    files = load_run(sample_run)
    ratio = dataclasses.replace(cost().ratios[0], repeats=2, left_out=1)  # of three, one had a failed request
    files.serving_cost = dataclasses.replace(cost(), ratios=(ratio,))
    with matplotlib.rc_context(STYLE):
        (latency,) = [drawn for drawn in draw_answers(files) if drawn.name == "latency"]
        (label,) = latency.figure.axes[0].get_yticklabels()
    assert label.get_text() == "ttft_mean_ms, 64 in, 16 out, 4 at once, 16 prompts, n = 2"


def test_names_are_text_in_the_figures(sample_run: Path, tmp_path: Path) -> None:
    """A name with markup or TeX is shown as it is."""
    run = tmp_path / "run"
    run.mkdir()
    hostile = "<b>$\\frac{1}{"
    scores = json.loads((sample_run / "eval" / "nvfp4" / "scores.json").read_text())
    for row in scores["scores"]:
        row["task"] = hostile
    (run / "eval" / "nvfp4").mkdir(parents=True)
    (run / "eval" / "nvfp4" / "scores.json").write_text(json.dumps(scores))
    (svg,) = [path for path in write_figures(run) if path.suffix == ".svg"]
    texts = ["".join(node.itertext()) for node in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert hostile in " ".join(texts)


def test_a_run_without_anything_to_draw_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: x\n")
    with pytest.raises(ConfigError, match="nothing to draw"):
        write_figures(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    ("name", "content", "drawn"),
    [
        ("gemm.parquet", "no table", "eval"),
        ("analysis.json", '{"schema_version": 1, "pairs": [1]}', "tensors.parquet"),
    ],
)
def test_what_cannot_be_read_is_named_once_the_rest_is_drawn(
    sample_run: Path, tmp_path: Path, name: str, content: str, drawn: str
) -> None:
    source = sample_run / drawn
    (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / drawn)
    (tmp_path / name).write_text(content)
    with pytest.raises(OutputError, match=name):
        write_figures(tmp_path)
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert "figures.md" in names
    assert ("scores.svg" if drawn == "eval" else "predicted.svg") in names
    assert not {"output_noise.svg", "density.svg"} & names
