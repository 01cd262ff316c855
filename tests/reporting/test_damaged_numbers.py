"""Numbers that no 64-bit number holds, and such as fit no figure, in records: the file is named, and left out alone."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import OutputError
from workbench.records import Divergence, from_json, parse_json
from workbench.reporting import build_report
from workbench.reporting.index import build_index
from workbench.reporting.load import load_run

BEYOND = {
    "400 digits": "1" + "0" * 400, "5000 digits": "-" + "9" * 5000, "a fraction": "1.5e999", "negative": "-1e400",
}  # fmt: skip


def _numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each number of JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _numbers(item, (*path, key))
    if isinstance(value, (int, float)) and not isinstance(value, bool) and path != ("schema_version",):
        yield path


def _set(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of JSON with one value in it replaced."""
    content = copy.deepcopy(content)
    at = content
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return content


def _divergence(run_dir: Path) -> str:
    return next(name for name, (attribute, _) in load_run(run_dir).sources.items() if attribute == "divergences")


@pytest.mark.parametrize("number", BEYOND.values(), ids=BEYOND)
def test_a_number_beyond_64_bits_is_damage_at_any_key_of_any_record(
    small_run: Path, tmp_path: Path, number: str
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(small_run, run_dir)
    names = [name for name in load_run(run_dir).sources if name.endswith(".json")]
    assert {name.partition("/")[0] for name in names} >= {"server", "eval", "comparison.json", "analysis.json"}
    tried = 0
    for name in names:
        content = json.loads((small_run / name).read_text())
        each = {path[-1]: path for path in _numbers(content)}  # each key once: thousands of matrices are alike
        for path in each.values() if number == BEYOND["400 digits"] else list(each.values())[:1]:
            (run_dir / name).write_text(json.dumps(_set(content, path, "HERE")).replace('"HERE"', number))
            (problem,) = load_run(run_dir).problems
            assert problem.startswith(f"{name}: "), problem
            assert "beyond 64 bits" in problem
            assert str(path[-1]) in problem
            assert len(problem) < 300
            tried += 1
        shutil.copy(small_run / name, run_dir / name)
    assert tried >= (100 if number == BEYOND["400 digits"] else len(names))


def test_whole_numbers_are_refused_beyond_int64_and_kept_within(small_run: Path) -> None:
    name = _divergence(small_run)
    content = json.loads((small_run / name).read_text())
    for fits in (2**63 - 1, -(2**63)):
        assert from_json(Divergence, json.dumps(_set(content, ("positions",), fits))).positions == fits
    for beyond in (2**63, -(2**63) - 1, 10**30):
        with pytest.raises(ValueError, match=r"Divergence\.positions is -?\d+, a number beyond 64 bits|characters"):
            from_json(Divergence, json.dumps(_set(content, ("positions",), beyond)))
    assert from_json(Divergence, json.dumps(_set(content, ("mean", "upper"), 10**30))).mean.upper == 1e30
    assert parse_json('{"a": [1, 2.5, null, "inf"]}') == {"a": [1, 2.5, None, "inf"]}
    with pytest.raises(ValueError, match=r"a\.b\[1\] is 9223372036854775808, a number beyond 64 bits"):
        parse_json('{"a": {"b": [1, 9223372036854775808]}}')


def test_the_page_and_the_index_are_made_without_the_damaged_file(small_run: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "run"
    shutil.copytree(small_run, run_dir)
    name = _divergence(run_dir)
    content = json.loads((run_dir / name).read_text())
    (run_dir / name).write_text(json.dumps(_set(content, ("mean", "upper"), 10**400)))
    with pytest.raises(OutputError, match=f"{name} is damaged: Divergence.mean.upper is 10000000… ") as raised:
        build_report(run_dir, strict=True)
    assert "evaluate" in raised.value.fix
    assert f"{name}: Divergence.mean.upper" in (run_dir / "report.html").read_text()
    assert name in build_index(tmp_path / "runs").read_text()


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), "inf"])
def test_a_duration_without_end_is_shown(small_run: Path, tmp_path: Path, value: Any) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(small_run, run_dir)
    path = run_dir / "eval" / "nvfp4" / "scores.json"
    path.write_text(json.dumps(_set(json.loads(path.read_text()), ("seconds",), value)))
    assert "∞ s" in build_report(run_dir, strict=True).read_text()


@pytest.mark.parametrize("bad", [("nvfp4",), ("nvfp4", "source")])
def test_only_the_file_that_does_not_fit_is_left_out(
    small_run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bad: tuple[str, ...]
) -> None:
    from workbench.reporting import build

    run_dir = tmp_path / "run"
    shutil.copytree(small_run, run_dir)
    made = build.make_context

    def refuse(files: Any, **settings: Any) -> Any:
        for arm in bad:
            if arm in files.evaluations or "nvfp4" in files.numerics:
                raise OverflowError("does not fit")
        return made(files, **settings)

    whole = load_run(run_dir)
    monkeypatch.setattr(build, "make_context", refuse)
    with pytest.raises(OutputError) as raised:
        build_report(run_dir, strict=True)
    cards = [name for name, source in whole.sources.items() if source == ("numerics", "nvfp4")]
    named = {*(f"eval/{arm}/scores.json" for arm in bad), *cards}
    assert {line.partition(" is damaged")[0] for line in str(raised.value).splitlines() if " is damaged" in line} == {
        str(run_dir / name) for name in named
    }
    page = (run_dir / "report.html").read_text()
    assert all(f"{name}: its contents do not fit (OverflowError" in page for name in named)
    assert "OverflowError" in (run_dir / "report.json").read_text()
