"""The bounds of the KL divergence hold the exact value, close as k grows, and the endpoint's answers become them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_server import VOCABULARY, fake_server, logprob_of
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench import cli
from workbench.errors import EvaluationError
from workbench.evaluation.kld import collect_logprobs, cut_windows, kl_divergence, position_bounds
from workbench.records import Divergence, from_json, to_json

FLOOR = 40.0


def _reported(logs: np.ndarray, k: int, actual: int) -> dict[str, float]:
    order = np.argsort(-logs, kind="stable")
    return {str(i): float(logs[i]) for i in dict.fromkeys([int(actual), *map(int, order[:k])])}


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - math.log(np.exp(shifted).sum())


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(2, 40),
    k=st.integers(1, 45),
    sharp=st.floats(0.1, 8.0),
    noise=st.floats(0.0, 6.0),
)
def test_bounds_hold_the_exact_divergence(seed: int, size: int, k: int, sharp: float, noise: float) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=size) * sharp
    p, q = _log_softmax(logits), _log_softmax(logits + rng.normal(size=size) * noise)
    floor = max(FLOOR, float(-q.min()))
    exact = float((np.exp(p) * (p - q)).sum())
    k, actual = min(k, size), int(rng.integers(size))
    low, high = position_bounds(_reported(p, k, actual), _reported(q, k, actual), k=k, floor_nats=floor)
    assert low - 1e-5 <= exact <= high + 1e-4
    if k == size:
        assert low == pytest.approx(exact, abs=1e-4)
        assert high == pytest.approx(exact, abs=1e-4)


def test_the_lower_bound_uses_that_an_untracked_token_is_small() -> None:
    """By hand, k = 2: what q does not track is at most its second probability."""
    p = {"a": math.log(0.6), "b": math.log(0.3)}
    q = {"a": math.log(0.6), "c": math.log(0.3)}
    low, high = position_bounds(p, q, k=2, floor_nats=5.0)
    assert low == pytest.approx(0.0, abs=1e-5)  # q(b) = .3 cannot be excluded
    assert high >= 0.3 * math.log(3.0) + 0.1 * math.log(1 / 3)  # nor can q(b) = .1, p(c) = .1
    low, _ = position_bounds({"a": math.log(0.1), "b": math.log(0.9)}, {"a": math.log(0.1), "c": math.log(0.5)}, k=2)
    # q(b) <= .1, so at least .9 log 9; the tail taken as one token would say .9 log 1
    assert low == pytest.approx(0.9 * math.log(9.0), abs=1e-4)


def test_without_a_floor_the_tail_has_no_upper_bound() -> None:
    p = {"a": math.log(0.9)}
    bounds = [position_bounds(p, p, k=1, floor_nats=floor)[1] for floor in (10.0, 20.0, 40.0)]
    assert np.diff(bounds) == pytest.approx([0.1 * 10, 0.1 * 20])


def _shifted(shift: float) -> Any:
    """The endpoint's distribution with the logit of every third token moved."""

    def logprob(token: int, before: int) -> float:
        total = math.log(sum(math.exp(logprob_of(t, before) + shift * (t % 3 == 0)) for t in range(VOCABULARY)))
        return logprob_of(token, before) + shift * (token % 3 == 0) - total

    table = [[logprob(token, before) for token in range(VOCABULARY)] for before in range(11)]
    return lambda token, before: table[before % 11][token]


def _windows() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [[int(t) for t in rng.integers(0, VOCABULARY, 9)] for _ in range(10)]


def test_two_endpoints_diverge_by_what_their_distributions_say(tmp_path: Path) -> None:
    changed, windows = _shifted(0.7), _windows()
    exact = [
        sum(math.exp(logprob_of(t, b)) * (logprob_of(t, b) - changed(t, b)) for t in range(VOCABULARY))
        for window in windows
        for b in window[:-1]
    ]
    found: dict[int, Divergence] = {}
    for k in (20, VOCABULARY):
        with fake_server(lambda prompt: "", lambda ids: "") as server:
            for name, logprob in (("source", logprob_of), ("arm", changed)):
                server.logprob = logprob
                collect_logprobs(base_url=server.url, model="m", windows=windows, k=k, path=tmp_path / name, name=name)
        found[k] = kl_divergence(tmp_path / "source", tmp_path / "arm")
    whole, part = found[VOCABULARY], found[20]
    assert (whole.reference, whole.arm, whole.windows, whole.positions) == ("source", "arm", 10, 80)
    assert whole.mean.lower == pytest.approx(np.mean(exact), abs=1e-5)
    assert whole.mean.upper == pytest.approx(np.mean(exact), abs=1e-5)
    assert whole.p999.lower == pytest.approx(np.quantile(exact, 0.999), abs=1e-5)
    assert part.mean.lower <= np.mean(exact) <= part.mean.upper
    assert part.tail_mass_reference > 0.01 > whole.tail_mass_reference
    assert whole.mean.lower_ci_low <= whole.mean.lower <= whole.mean.lower_ci_high
    assert 0.0 <= whole.same_top1_low <= whole.same_top1 <= whole.same_top1_high <= 1.0
    assert from_json(Divergence, to_json(whole)) == whole


def test_an_endpoint_does_not_diverge_from_itself_and_is_asked_once(tmp_path: Path) -> None:
    windows = _windows()[:3]
    with fake_server(lambda prompt: "", lambda ids: "") as server:
        ask = {"base_url": server.url, "model": "m", "windows": windows, "k": 5, "fingerprint": "f", "concurrency": 1}
        collect_logprobs(path=tmp_path / "a", **ask)
        text = (tmp_path / "a").read_text()
        (tmp_path / "a").write_text(text[:-5])  # killed within the last window
        collect_logprobs(path=tmp_path / "a", **ask)
        assert (tmp_path / "a").read_text() == text
        assert len(server.payloads) == 4
        collect_logprobs(path=tmp_path / "a", **{**ask, "fingerprint": "other"})
        assert len(server.payloads) == 7
        collect_logprobs(path=tmp_path / "b", **ask)
    same = kl_divergence(tmp_path / "a", tmp_path / "b")
    assert (same.mean.lower, same.same_top1, same.delta_p_mean_pp) == (pytest.approx(0.0, abs=1e-5), 1.0, 0.0)
    assert math.isnan(same.mean.lower_ci_low)  # three windows give no interval


def test_what_cannot_be_compared_is_refused(tmp_path: Path, tokenizer_dir: Path) -> None:
    windows = _windows()[:2]
    with fake_server(lambda prompt: "", lambda ids: "") as server:
        collect_logprobs(base_url=server.url, model="m", windows=windows, k=5, path=tmp_path / "a")
        collect_logprobs(base_url=server.url, model="m", windows=windows, k=6, path=tmp_path / "b")
        collect_logprobs(base_url=server.url, model="m", windows=windows[:1], k=5, path=tmp_path / "c")
        with pytest.raises(EvaluationError, match="differ in k: 5 and 6"):
            kl_divergence(tmp_path / "a", tmp_path / "b")
        with pytest.raises(EvaluationError, match="differ in text"):
            kl_divergence(tmp_path / "a", tmp_path / "c")
        lines = (tmp_path / "a").read_text().splitlines(keepends=True)
        (tmp_path / "d").write_text("".join(lines[:-1]))
        with pytest.raises(EvaluationError, match=r"2 windows and .* 1"):
            kl_divergence(tmp_path / "a", tmp_path / "d")
        server.echo = False
        with pytest.raises(EvaluationError, match="echo with logprobs is not supported"):
            collect_logprobs(base_url=server.url, model="m", windows=windows, k=5, path=tmp_path / "e", retries=0)
    with pytest.raises(EvaluationError, match="does not exist"):
        kl_divergence(tmp_path / "a", tmp_path / "none")
    assert [len(window) for window in cut_windows("abcdefgh", tokenizer_dir, tokens=3, count=2)] == [3, 3]
    with pytest.raises(EvaluationError, match="8 tokens, 3 windows of 3 need 9"):
        cut_windows("abcdefgh", tokenizer_dir, tokens=3, count=3)
    assert json.loads((tmp_path / "a").read_text().splitlines()[0])["k"] == 5


def test_the_two_commands_print_and_write_the_divergence(
    tmp_path: Path, tokenizer_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven eight nine ten " * 40)
    flags = ["--tokenizer", str(tokenizer_dir), "--text", str(text), "--tokens", "16", "--windows", "9", "--top-k", "5"]
    for name, logprob in (("a", logprob_of), ("b", _shifted(0.7))):
        with fake_server(lambda prompt: "", lambda ids: "") as server:
            server.logprob = logprob
            out = ["--out", str(tmp_path / f"{name}.jsonl"), "--name", name]
            assert cli.main(["logprobs", server.url, "--model", "m", *flags, *out]) == 0
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert cli.main(["kld", *files, "--json", str(tmp_path / "kld.json")]) == 0
    printed = capsys.readouterr().out
    found = from_json(Divergence, (tmp_path / "kld.json").read_text())
    assert "KL(a || b), nats" in printed
    assert f"{found.mean.lower:.4g}" in printed
    assert cli.main(["kld", files[0], str(tmp_path / "none.jsonl")]) == 3
