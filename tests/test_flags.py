"""An error of a command names its flags, not an experiment's settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from workbench.mini_models import model_path

from workbench import cli
from workbench.flags import in_flags


@pytest.mark.parametrize(
    ("words", "named", "unsaid"),
    [
        (["serve", "MODEL", "--backend", "requant"], ["--format mxfp4"], "format="),
        (["serve", "MODEL", "--port", "99999"], ["--port 99999"], "engine."),
        (["numerics", "MODEL", "--dtype", "int3"], ["--dtype int3"], "engine."),
        (["serve", "MODEL", "--tensor-parallel-size", "0"], ["--tensor-parallel-size 0"], "engine."),
        (["serve", "MODEL", "--max-model-len", "-1"], ["--max-model-len -1"], "engine."),
        (["serve", "MODEL", "--kv-cache-dtype", "odd"], ["--kv-cache-dtype odd", "--engine-arg"], "engine."),
        (["serve", "MODEL", "--format", "mxfp4"], ["--backend requant"], "backend="),
        (["serve", "MODEL", "--backend", "reference", "--compat", "vllm"], ["--compat none"], "compat="),
        (["lint", "MODEL", "--allow", "bogus"], ["--allow names an unknown check 'bogus'"], "lint.allow"),
    ],
    ids=lambda value: " ".join(value[2:]) if isinstance(value, list) else None,
)
def test_a_commands_error_names_its_flags(
    words: list[str], named: list[str], unsaid: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert cli.main([str(model_path()) if word == "MODEL" else word for word in words]) == 3
    said = capsys.readouterr().err
    for name in named:
        assert name in said
    assert unsaid not in said


def test_only_the_commands_own_flags_are_put_in() -> None:
    text = "use backend=reference, or exclude it (exclude=['a.b*']); engine.startup_timeout_s=5; x,backend=stock"
    flagged = "use --backend reference, or exclude it (--exclude a.b*); engine.startup_timeout_s=5; x,backend=stock"
    assert in_flags(text, {"backend", "exclude"}) == flagged
    assert in_flags(text, {"format"}) == text
    assert in_flags("set format=mxfp4", {"format", "requant"}) == "set format=mxfp4"
    assert in_flags("api=chat (or chat_template=true)", {"api", "chat_template"}) == "--api chat (or --chat-template)"
