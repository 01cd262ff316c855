"""The streaming pass over checkpoints: rows, resume, errors that name the tensor, the written table."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from workbench.analysis.algebra import measure_matrix
from workbench.analysis.journal import Journal
from workbench.analysis.tensors import ArmPair, analyze_weights, read_frame, write_frame
from workbench.checkpoints import open_checkpoint
from workbench.errors import CheckpointError, ConfigError, OutputError
from workbench.formats import quantize
from workbench.records import TensorRecord

from .trio_checkpoints import MODULES, Trio, write_checkpoint


def requant_pair(trio: Trio, rule: str = "even", **changes: object) -> ArmPair:
    values = {"first": trio.nvfp4, "first_arm": "nvfp4", "second_arm": "nvfp4_to_mxfp4", "second_rule": rule}
    return ArmPair(**(values | changes))  # type: ignore[arg-type]


def test_a_row_per_quantized_matrix_in_layer_order(trio: Trio) -> None:
    frame = analyze_weights(source=trio.source, pairs=[requant_pair(trio)])
    assert list(frame.columns) == [f.name for f in dataclasses.fields(TensorRecord)]
    assert set(frame["name"]) == {f"{m}.weight" for m in MODULES}
    assert frame["layer"].is_monotonic_increasing
    row = frame[frame["name"] == "model.layers.1.mlp.experts.2.up_proj.weight"].iloc[0]
    assert (row["layer"], row["expert"], row["projection"], bool(row["shared_expert"])) == (1, 2, "up_proj", False)
    assert (row["rows"], row["columns"]) == (32, 64)
    assert (row["source_format"], row["first_format"], row["second_format"]) == ("bf16", "nvfp4", "mxfp4")
    shared = frame[frame["name"].str.contains("shared")].iloc[0]
    assert bool(shared["shared_expert"])
    assert shared["expert"] == -1


def test_figures_are_those_of_the_stored_first_and_its_requantization(trio: Trio) -> None:
    frame = analyze_weights(source=trio.source, pairs=[requant_pair(trio, "floor")], seed=5)
    name = "model.layers.1.mlp.experts.0.gate_proj.weight"
    row = frame[frame["name"] == name].iloc[0]
    w = trio.weights[name].float()
    q = quantize(w, "nvfp4")
    a = q.dequantize()
    want = measure_matrix(
        w, a, quantize(a, "mxfp4", "floor").dequantize(), quantize(w, "mxfp4", "floor").dequantize(), name=name
    )
    of_scales = {key for key in want if "_error_" in key or "flowed" in key or "saturated" in key or "asymm" in key}
    for key in want.keys() - of_scales:  # dense values have no scales
        assert row[key] == pytest.approx(want[key], rel=1e-9, abs=1e-15, nan_ok=True), key
    assert np.float32(row["first_global_scale"]) == np.float32(q.global_scale)


def test_several_pairs_are_rows_of_one_table(trio: Trio) -> None:
    pairs = [
        requant_pair(trio),
        requant_pair(trio, "ceil", direct=trio.mxfp4),
        ArmPair(first=None, second_arm="mxfp4_direct", second=trio.mxfp4),
    ]
    frame = analyze_weights(source=trio.source, pairs=pairs)
    key = ["name", "source_arm", "first_arm", "second_arm", "second_rule"]
    assert len(frame) == 3 * len(MODULES)
    assert not frame.duplicated(key).any()
    alone = frame[frame["first_arm"] == ""]
    assert alone["sqnr_first_db"].isna().all()
    assert alone["first_global_scale"].isna().all()
    pd.testing.assert_series_equal(alone["sqnr_direct_db"], alone["sqnr_total_db"], check_names=False)
    assert set(alone["missing"]) == {"first"}
    other = analyze_weights(source=trio.source, pairs=[ArmPair(first=None, second_arm="nvfp4", second=trio.nvfp4)])
    assert other["sqnr_direct_db"].isna().all()  # MXFP4 of the source says nothing of a stored NVFP4
    assert set(other["missing"]) == {"first,direct"}
    ceil = frame[frame["second_rule"] == "ceil"]  # its direct arm is the stored even-rule checkpoint
    pd.testing.assert_series_equal(
        ceil["sqnr_direct_db"].reset_index(drop=True), alone["sqnr_total_db"].reset_index(drop=True), check_names=False
    )
    with pytest.raises(ConfigError, match="nvfp4_to_mxfp4"):
        analyze_weights(source=trio.source, pairs=[requant_pair(trio), requant_pair(trio)])


def test_a_killed_pass_continues_and_ends_in_the_same_table(trio: Trio, tmp_path: Path) -> None:
    whole = analyze_weights(source=trio.source, pairs=[requant_pair(trio)])
    journal = tmp_path / "journal"

    def stop_after_three(names, total, label):  # type: ignore[no-untyped-def]
        for done, name in enumerate(names):
            if done == 3:
                raise KeyboardInterrupt
            yield name

    with pytest.raises(KeyboardInterrupt):
        analyze_weights(source=trio.source, pairs=[requant_pair(trio)], journal=journal, progress=stop_after_three)
    lines = journal.read_text().splitlines()
    assert len(lines) == 4
    marked = json.loads(lines[1])
    marked["rows"][0][list(whole.columns).index("projection")] = "kept"
    journal.write_text("\n".join([lines[0], json.dumps(marked), *lines[2:]]) + '\n{"name": "half a li')
    resumed = analyze_weights(source=trio.source, pairs=[requant_pair(trio)], journal=journal)
    assert resumed["projection"].iloc[0] == "kept"  # the first matrix was not measured again
    resumed.loc[0, "projection"] = whole["projection"].iloc[0]
    pd.testing.assert_frame_equal(resumed, whole)
    assert resumed.attrs == whole.attrs


def test_a_journal_of_other_settings_is_not_used(trio: Trio, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    analyze_weights(source=trio.source, pairs=[requant_pair(trio)], journal=journal)
    ceil = analyze_weights(source=trio.source, pairs=[requant_pair(trio, "ceil")], journal=journal)
    pd.testing.assert_frame_equal(ceil, analyze_weights(source=trio.source, pairs=[requant_pair(trio, "ceil")]))


def test_parquet_keeps_infinities_nans_and_the_density(trio: Trio, tmp_path: Path) -> None:
    frame = analyze_weights(source=trio.source, pairs=[requant_pair(trio)])
    frame.loc[0, "sqnr_first_db"] = np.inf
    frame.loc[0, "corr_e1_e2"] = np.nan
    write_frame(tmp_path / "tensors.parquet", frame)
    back = read_frame(tmp_path / "tensors.parquet")
    assert back["sqnr_first_db"].iloc[0] == np.inf
    assert np.isnan(back["corr_e1_e2"].iloc[0])
    counts = np.array(back.attrs["error_density"]["nvfp4|nvfp4_to_mxfp4|even"]["counts"])
    assert counts.shape == (48, 48)
    assert counts.sum() > 0.9 * len(MODULES) * 32 * 64
    assert [p.name for p in tmp_path.iterdir()] == ["tensors.parquet"]


def test_an_arm_of_another_shape_is_an_error_that_names_the_tensor(trio: Trio, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.gate_proj.weight"
    narrow = {n: (w[:16] if n == name else w) for n, w in trio.weights.items()}
    write_checkpoint(tmp_path / "narrow", narrow)
    with pytest.raises(CheckpointError, match=rf"{name}.*\(16, 64\)") as error:
        analyze_weights(source=tmp_path / "narrow", pairs=[requant_pair(trio)])
    assert error.value.fix


def test_a_missing_tensor_is_named(trio: Trio, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.1.up_proj.weight"
    write_checkpoint(tmp_path / "short", {n: w for n, w in trio.weights.items() if n != name})
    with pytest.raises(CheckpointError, match=name):
        analyze_weights(source=tmp_path / "short", pairs=[requant_pair(trio)])


def test_a_plain_first_checkpoint_has_nothing_to_analyze(trio: Trio) -> None:
    with pytest.raises(CheckpointError, match="no quantized matrix"):
        analyze_weights(source=trio.source, pairs=[requant_pair(trio, first=trio.source)])


def test_each_arm_is_read_once_and_one_matrix_ahead(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    kind = type(open_checkpoint(trio.source))
    read, add = kind.read, Journal.add

    def noted(self, name: str) -> torch.Tensor:  # type: ignore[no-untyped-def]
        events.append(("read", name))
        return read(self, name)

    def finished(self, name: str, *rest: object) -> None:  # type: ignore[no-untyped-def]
        events.append(("done", name))
        add(self, name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(kind, "read", noted)
    monkeypatch.setattr(Journal, "add", finished)
    names = list(analyze_weights(source=trio.source, pairs=[requant_pair(trio)])["name"])
    assert [name for what, name in events if what == "read"] == [name for name in names for _ in ("source", "first")]
    for index, (what, name) in enumerate(events):
        if what == "read":  # at most the next one: the one before the previous is done
            done = {n for kind_, n in events[:index] if kind_ == "done"}
            assert names.index(name) - len(done) <= 1


def test_a_journal_on_a_full_disk_names_its_file(tmp_path: Path) -> None:
    """Closing writes what is still buffered once more, and must not hide where it was to go."""
    path = tmp_path / "rows.jsonl"

    def fill(*, by_adding: bool) -> None:
        with Journal.open(path, {}) as journal:
            journal._stream = open("/dev/full", "ab")  # noqa: SIM115 - the journal closes it
            if by_adding:
                journal.add("w", [])
            journal._stream.write(b"x")

    for by_adding in (True, False):
        with pytest.raises(OutputError, match="No space left") as caught:
            fill(by_adding=by_adding)
        assert str(path) in caught.value.message
