"""A byte-level tokenizer made here, and one real lm-eval run that several tests look at."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from canned import canned_answer, specs
from fake_server import fake_server

from workbench.evaluation.run import evaluate
from workbench.records import write_json


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token a byte: as simple as a tokenizer can be, and lossless."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, "</eos>"])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</eos>", "model_max_length": 100000}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def decode(tokenizer_dir: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json")).decode


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path, decode: Any) -> dict[str, Any]:
    """Arms `source` (forward, 4 at once) and `source_again` (reversed, one at a time) evaluated by real lm-eval."""
    run_dir = tmp_path_factory.mktemp("run")
    found: dict[str, Any] = {"run_dir": run_dir}
    for arm, order, concurrency in (("source", "forward", 4), ("source_again", "reversed", 1)):
        seen: list[tuple[int, int]] = []
        with fake_server(canned_answer, decode) as server:
            evaluation = evaluate(
                arm=arm,
                base_url=server.url,
                model="org/mini",
                tokenizer=tokenizer_dir,
                tasks=specs(),
                out_dir=run_dir / "eval" / arm,
                concurrency=concurrency,
                request_order=order,
                max_length=4096,
                progress=lambda done, total, seen=seen: seen.append((done, total)),
            )
            write_json(run_dir / "eval" / arm / "scores.json", evaluation)
            found[arm] = {"evaluation": evaluation, "server": server, "progress": seen}
    return found


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`evaluate` without its child process: what the child would do is done here, in a second instead of ten."""
    import datasets.config

    import workbench.evaluation.run as run
    from workbench.evaluation._harness import evaluate_request

    def harness(
        command: Any, environment: Any, log: Path, arm: str, progress: Any, watch: Any, failed: Any
    ) -> dict[str, Any]:
        events = io.StringIO()
        result = evaluate_request(json.loads(Path(command[-1]).read_text()), events)
        for event in map(json.loads, events.getvalue().splitlines()):
            for name, told in (("progress", progress), ("failed", failed)):
                if name in event and told is not None:
                    told(*event[name])
        return dict(json.loads(json.dumps(result)))

    monkeypatch.setattr(run, "run_harness", harness)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
