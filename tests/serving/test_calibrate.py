"""`workbench calibrate` on the shipped model with the real engine, and what `workbench analyze` makes of its file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from workbench.mini_models import model_path

from workbench.analysis.moments import second_moment
from workbench.checkpoints.convert import quantize_checkpoint
from workbench.cli import main
from workbench.formats.activations import Activations, read_activations

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LAYER = "model.layers.2.*"


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Activations:
    """Every row of a few prompts, and the whole second moment of each input."""
    folder = tmp_path_factory.mktemp("calibrate")
    prompts = folder / "prompts.txt"
    prompts.write_text("".join(f"Question {i}: what is {i} plus {3 * i}? Answer: {4 * i}\n" for i in range(12)))
    out = folder / "activations.safetensors"
    arguments = ["--prompts", str(prompts), "--second-moments", "full", "--rows", "100000", "--out", str(out)]
    assert main(["calibrate", str(model_path()), *arguments]) == 0
    return read_activations(out)


def test_the_file_s_moments_are_those_of_all_rows(captured: Activations) -> None:
    seen = [module for module in captured.modules() if captured.tokens_seen(module)]
    assert len(seen) > 100
    for module in seen:
        x = captured.input(module)
        assert len(x) == captured.tokens_seen(module)  # nothing was cut, so the rows say what the moment is
        want, got = second_moment(x), captured.second_moment(module)
        assert got is not None
        assert float((got.double() - want).abs().max()) <= 1.2e-7 * float(want.abs().max()), module


def test_analyze_takes_the_captured_moments(captured: Activations, tmp_path: Path) -> None:
    """Predicted from moments and measured on the rows that they are of: one number, to a float32 product's rounding."""
    nvfp4 = tmp_path / "nvfp4"
    quantize_checkpoint(model_path(), nvfp4, format="nvfp4", dialect="modelopt")
    tables = {}
    for products in ("moments", "auto"):
        out = tmp_path / products
        arguments = ["--products", products, "--activations", str(captured.path), "--bootstrap", "2"]
        main(["analyze", str(model_path()), str(nvfp4), "--select", LAYER, "--out", str(out), *arguments])
        tables[products] = pd.read_parquet(out / "gemm.parquet")
    moments, rows = tables["moments"], tables["auto"]
    assert set(moments["activations"]) == {"moments (full)"}
    both = moments.merge(rows[rows["kind"] == "weight"], on=["name", "arm"], suffixes=("", "_rows"))
    both = both[both["tokens"].between(1, 1024)]  # what is measured on every row
    assert len(both) > 50
    np.testing.assert_allclose(both["sqnr_db"], both["sqnr_db_rows"], atol=1e-3)
