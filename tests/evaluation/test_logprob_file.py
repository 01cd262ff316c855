"""What no softmax can give is refused, by name, before it is kept or judged; an honest zero is not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_server import VOCABULARY, fake_server

from workbench import cli
from workbench.errors import ConfigError, EvaluationError
from workbench.evaluation.kld import collect_logprobs, kl_divergence, position_bounds
from workbench.records import hold_lock

K = 5
WINDOWS = [[7, 21, 36, 49, 63, 77], [2, 4, 6, 8, 10, 12]]
TOKEN = "token_id:36"


def _top(answer: dict[str, Any]) -> dict[str, Any]:
    """What the endpoint tells about position 2 of the first window, where token 36 stands; {} in the other window."""
    logprobs = answer["choices"][0]["logprobs"]
    return logprobs["top_logprobs"][2] if logprobs["tokens"][2] == TOKEN else {}


def _set(value: Any) -> Callable[[dict[str, Any]], None]:
    def change(answer: dict[str, Any]) -> None:
        if top := _top(answer):
            top[TOKEN] = value

    return change


def _all(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda answer: _top(answer).update(dict.fromkeys(_top(answer), value))


def _only_own(answer: dict[str, Any]) -> None:
    top = _top(answer)
    for name in [name for name in top if name != TOKEN]:
        del top[name]


def _other(answer: dict[str, Any]) -> None:
    tokens = answer["choices"][0]["logprobs"]["tokens"]
    if tokens[2] == TOKEN:
        tokens[2] = "token_id:37"


def _collect(path: Path, change: Any = None, **settings: Any) -> None:
    with fake_server(lambda prompt: "", lambda ids: "") as server:
        server.change = change or server.change
        ask = {"windows": WINDOWS, "k": K, "path": path, "retries": 0, "concurrency": 1, **settings}
        collect_logprobs(base_url=server.url, model="m", **ask)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set(math.nan), f"window 0, position 2: token '{TOKEN}': the log-probability nan is not finite"),
        (_set(math.inf), "the log-probability inf is not finite"),
        (_set(0.7), r"the log-probability 0\.7 is above 0"),
        (_set(None), "the log-probability None is no number"),
        (_set("-0.5"), "the log-probability '-0.5' is no number"),
        (_set(-(10**400)), "is no number that a computer holds"),
        (_all(-math.inf), "one of the 5 most likely has probability 0, but all told have only 0"),
        (_all(-0.1), r"the probabilities add up to 5\.\d+, above 1"),
        (_only_own, f"token '{TOKEN}': 1 tokens are told where k is 5"),
        (_other, "window 0, position 2: the token is 'token_id:37', but 'token_id:36' was sent"),
    ],
)
def test_an_endpoint_s_impossible_log_probabilities_are_not_kept(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        _collect(tmp_path / "a", change)
    assert '"window": 0' not in (tmp_path / "a").read_text()


def test_null_token_logprobs_and_broken_choices_are_answers_and_no_bugs(tmp_path: Path) -> None:
    for change, message in (
        (lambda answer: answer.update(choices=["x"]), "no log-probabilities of the prompt"),
        (lambda answer: answer["choices"][0]["logprobs"].update(tokens=None), "7 positions for 6 prompt tokens"),
        (lambda answer: answer["choices"][0]["logprobs"]["top_logprobs"].__setitem__(3, None), "no token with a map"),
    ):
        with pytest.raises(EvaluationError, match=message):
            _collect(tmp_path / "a", change)


def test_an_honest_zero_is_judged_at_the_floor(tmp_path: Path) -> None:
    """A masked token's -inf is kept as -9999, as vLLM writes it, and counts as exp(-F) on the arm's side."""
    _collect(tmp_path / "p")
    _collect(tmp_path / "q", _set(-math.inf))
    assert "Infinity" not in (tmp_path / "q").read_text()
    found = kl_divergence(tmp_path / "p", tmp_path / "q")
    assert found.floor_nats == pytest.approx(149 * math.log(2))
    assert 0.0 < found.mean.lower <= found.mean.upper < math.inf
    p = {"a": math.log(0.5), "b": math.log(0.5)}
    for zero in (-9999.0, -math.inf):
        low, high = position_bounds(p, {"a": 0.0, "b": zero}, k=2, floor_nats=10.0)
        assert low == high == pytest.approx(0.5 * math.log(0.5) + 0.5 * (math.log(0.5) + 10.0))
        low, high = position_bounds({"a": 0.0, "b": zero}, p, k=2, floor_nats=10.0)
        assert low == pytest.approx(math.log(2.0), abs=1e-5)
        assert high == pytest.approx(math.log(2.0), abs=1e-5)


def _edit(path: Path, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _put(value: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda rows: rows[1]["positions"][1][1].update({TOKEN: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_put(math.nan), rf"b\.jsonl, line 2: window 0, position 2: token '{TOKEN}': the log-probability nan"),
        (_put(math.inf), "line 2: window 0, position 2.*is not finite"),
        (_put(0.1), "is above 0"),
        (_put(None), "is no number"),
        (_put("x"), "is no number"),
        (_put(True), "is no number"),
        (lambda rows: rows[1]["positions"][1][1].clear(), "window 0, position 2: no token with a map"),
        (lambda rows: rows[1]["positions"][1][1].pop(TOKEN), "its own log-probability is missing"),
        (lambda rows: rows[1]["positions"].__setitem__(1, None), "window 0, position 2: no token"),
        (lambda rows: rows[1].update(positions=None), "window 0 holds no list of positions"),
        (lambda rows: rows[1]["positions"].pop(), "window 0 has 5 positions in .* and 4 in"),
        (lambda rows: rows.append(rows[1]), "line 4: window 0 stands there twice"),
        (lambda rows: rows[1].update(window=9), "2 windows and .* 2: only .*a.jsonl has window 0; only .*b.*window 9"),
        (lambda rows: rows[1].update(window="0"), "the window is '0', no number"),
        (lambda rows: rows.__delitem__(slice(1, None)), "2 windows and .* 0: only .*a.jsonl has windows 0, 1"),
        (lambda rows: rows.pop(0), "line 1: no header"),
        (lambda rows: rows[0].update(k="5"), "line 1: no header.*k is missing or impossible"),
        (lambda rows: rows[0].update(k=0), "line 1: no header"),
    ],
)
def test_a_damaged_file_is_refused_by_line_window_position_and_token(tmp_path: Path, change: Any, message: str) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        _collect(tmp_path / name)
    _edit(tmp_path / "b.jsonl", change)
    with pytest.raises(EvaluationError, match=message):
        kl_divergence(tmp_path / "a.jsonl", tmp_path / "b.jsonl")


def test_another_actual_token_is_noticed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        _collect(tmp_path / name)
    (tmp_path / "b").write_text((tmp_path / "b").read_text().replace(TOKEN, "token_id:299"))
    with pytest.raises(EvaluationError, match=f"window 0, position 2: the token is '{TOKEN}' in .* 'token_id:299'"):
        kl_divergence(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"[" * 99999, b"5\n", b'{"k": 5', b"{}\n"])
def test_what_is_no_such_file_ends_in_3_without_a_traceback(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    _collect(tmp_path / "a")
    (tmp_path / "b").write_bytes(content)
    assert cli.main(["kld", str(tmp_path / "a"), str(tmp_path / "b")]) == 3
    said = capsys.readouterr().err
    assert str(tmp_path / "b") in said
    assert "Traceback" not in said


def test_few_windows_say_why_there_is_no_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _collect(tmp_path / "a", k=VOCABULARY)
    assert cli.main(["kld", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    said = capsys.readouterr().out
    assert "no intervals: they take 8 windows, there are 2" in said
    assert "nan" not in said


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    with (
        hold_lock(tmp_path / ".a.lock", "held"),
        pytest.raises(ConfigError, match="another process is writing"),
    ):
        _collect(tmp_path / "a")
    _collect(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
