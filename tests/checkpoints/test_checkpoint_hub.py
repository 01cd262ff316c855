"""Checkpoints on the Hub, read by ranges: against a local server that speaks the Hub's HTTP (`hub_server.py`)."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hub_server import COMMIT, HubServer
from huggingface_hub import constants, snapshot_download
from huggingface_hub.utils import _http, close_session
from tiny_checkpoints import tiny_tensors, write_checkpoint

from workbench import cli
from workbench.checkpoints import hub, open_checkpoint
from workbench.checkpoints.header import FIRST_READ_BYTES
from workbench.checkpoints.lint import lint_checkpoint
from workbench.checkpoints.open import resolve_path
from workbench.errors import CheckpointError

STACK = "model.layers.2.stack"
BIG = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards, each longer than the first read of a header; a stack of 8 matrices."""
    generator = torch.Generator().manual_seed(1)
    tensors = tiny_tensors()
    tensors[STACK] = torch.randn(8, 64, 256, generator=generator).bfloat16()
    tensors[BIG] = torch.randn(1024, 256, generator=generator).bfloat16()
    return write_checkpoint(tmp_path_factory.mktemp("hub") / "tiny", tensors, tie_word_embeddings=False)


@pytest.fixture
def server(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer({"org/tiny": model}) as running:
        point_at(running.url, tmp_path / "cache", monkeypatch)
        yield running
        close_session()


def point_at(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_ENDPOINT and HF_HUB_CACHE do at import; and no waiting between retries."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(_http.time, "sleep", lambda _: None)
    monkeypatch.setattr(hub, "TRAFFIC", hub.Traffic())


def fails(path: str | Path, *fragments: str) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    for fragment in fragments:
        assert fragment in caught.value.message, caught.value.message
    assert caught.value.fix
    return caught.value


# ---- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("revision", ["", "@main", "@v1", "@" + COMMIT])
def test_every_tensor_is_what_the_folder_holds(server, model, revision):
    with open_checkpoint("hf://org/tiny" + revision) as remote, open_checkpoint(model) as local:
        assert remote.entries() == local.entries()
        assert remote.config == local.config
        for entry in local.entries():
            assert torch.equal(remote.read(entry.name), local.read(entry.name))
        assert remote.folder.name == f"hf://org/tiny@{COMMIT}"


def test_only_headers_and_the_asked_ranges_are_read(server, model):
    with open_checkpoint("hf://org/tiny") as checkpoint:
        for file in checkpoint.folder.files:
            assert server.ranges(file) == [(0, FIRST_READ_BYTES - 1)]
        info = checkpoint.parts(BIG)["values"]
        server.log.clear()
        checkpoint.read(BIG)
        assert [(r.method, r.range) for r in server.log] == [("GET", (info.begin, info.end - 1))]


def test_rows_of_a_stack_are_one_range(server, model):
    with open_checkpoint("hf://org/tiny") as remote, open_checkpoint(model) as local:
        info = remote.folder.tensors[STACK]
        server.log.clear()
        assert torch.equal(remote.folder.load(STACK, rows=(3, 5)), local.folder.load(STACK)[3:5])
        row = info.nbytes // 8
        assert [r.range for r in server.log] == [(info.begin + 3 * row, info.begin + 5 * row - 1)]


def test_a_header_longer_than_the_first_read(server, model, monkeypatch):
    monkeypatch.setattr("workbench.checkpoints.header.FIRST_READ_BYTES", 100)
    with open_checkpoint("hf://org/tiny") as checkpoint:
        for file, raw in checkpoint.folder.headers.items():
            assert server.ranges(file) == [(0, 99), (100, 7 + len(raw))]


def test_requests_and_bytes_are_counted_and_shown(server, model, capsys):
    # the library's own count: its requests reach the server one by one
    report = lint_checkpoint("hf://org/tiny")
    assert hub.TRAFFIC.requests == len(server.log)
    ranged = sum(r.range[1] - r.range[0] + 1 for r in server.log if r.range)
    configs = sum((model / name).stat().st_size for name in ("config.json", "model.safetensors.index.json"))
    assert hub.TRAFFIC.bytes == ranged + configs
    local = lint_checkpoint(model)
    assert local.value_bytes_read == local.value_bytes == report.value_bytes
    assert (report.value_bytes_read, report.weights) == (0, "")  # and it says so
    assert dataclasses.replace(report, checkpoint="", seconds=0) == dataclasses.replace(
        local, checkpoint="", seconds=0, value_bytes_read=0, weights=""
    )
    before = hub.TRAFFIC.requests
    assert cli.main(["lint", "hf://org/tiny"]) == cli.main(["lint", str(model)])
    assert f"{hub.TRAFFIC.requests} requests to the Hub" in capsys.readouterr().out
    assert hub.TRAFFIC.requests > before


def test_a_conversion_reads_ranges_and_writes_what_a_folder_gives(server, model, tmp_path):
    options = ["--format", "mxfp4", "--dialect", "quark"]
    for source, target in (("hf://org/tiny", "remote"), (str(model), "local")):
        assert cli.main(["quantize", source, str(tmp_path / target), *options]) == 0
    written = {path.name for path in (tmp_path / "local").iterdir()}
    assert {path.name for path in (tmp_path / "remote").iterdir()} == written >= {"tokenizer.json", "config.json"}
    for name in written - {"README.md"}:  # the card names its source
        assert (tmp_path / "remote" / name).read_bytes() == (tmp_path / "local" / name).read_bytes(), name


def test_the_token_goes_to_the_hub_and_not_to_where_it_redirects(server, model, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with HubServer(server.repos) as cdn:
        server.redirects_to = cdn.url
        with open_checkpoint("hf://org/tiny") as remote, open_checkpoint(model) as local:
            assert torch.equal(remote.read(BIG), local.read(BIG))
        assert {r.token for r in server.log} == {"Bearer hf_secret"}
        assert {r.token for r in cdn.log} == {""}
        assert all(r.range for r in cdn.log)


def test_the_fingerprint_reads_no_weights_and_tells_contents_apart(server, model, tmp_path):
    with open_checkpoint("hf://org/tiny") as checkpoint:
        server.log.clear()
        first = checkpoint.fingerprint()
        assert checkpoint.weights_digest() == ""
        assert server.log == []
    other = Path(shutil.copytree(model, tmp_path / "other"))
    shard = other / "model-00001-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    server.repos["org/other"] = other
    with open_checkpoint("hf://org/other") as checkpoint:
        assert checkpoint.fingerprint() != first
    with open_checkpoint("hf://org/tiny@v1") as checkpoint:
        assert checkpoint.fingerprint() == first


def test_side_files_are_fetched_when_asked_for_and_weights_are_not(server, model, tmp_path):
    folder = Path(shutil.copytree(model, tmp_path / "more"))
    (folder / "code").mkdir()
    (folder / "code" / "model.py").write_text("x = 1")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / ".hidden").write_text("")
    server.repos["org/more"] = folder
    with open_checkpoint("hf://org/more") as remote, open_checkpoint(folder) as local:
        names = ["code/model.py", "config.json", "model.safetensors.index.json", "tokenizer.json"]
        for checkpoint in (remote, local):
            found = checkpoint.folder.side_files()
            assert [name for name, _ in found] == names
            assert found[0][1].read_text() == "x = 1"
    assert not server.ranges("pytorch_model.bin")


def test_names_that_a_repository_lists_outside_itself_are_ignored(server, model):
    info = json.loads(json.dumps({"id": "org/evil", "sha": COMMIT, "siblings": []}))
    info["siblings"] = [
        {"rfilename": name, "size": 2} for name in ("../config.json", "/etc/passwd", "a/../../b.json", "x\\y", "n\0l")
    ]
    server.answers["/api/models/org/evil"] = json.dumps(info).encode()
    fails("hf://org/evil", "no config.json")


# ---- the local cache -------------------------------------------------------------------------------------------------


def test_shards_that_the_cache_holds_are_read_there(server, model):
    snapshot_download("org/tiny", allow_patterns=["*00001*"])
    server.log.clear()
    with open_checkpoint("hf://org/tiny") as remote, open_checkpoint(model) as local:
        for entry in local.entries():
            assert torch.equal(remote.read(entry.name), local.read(entry.name))
    assert not server.ranges("model-00001-of-00002.safetensors")
    assert server.ranges("model-00002-of-00002.safetensors")


@pytest.mark.parametrize("offline", [True, False])
def test_without_the_hub_a_whole_snapshot_is_read(server, model, tmp_path, monkeypatch, offline):
    snapshot_download("org/tiny")
    if offline:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    server.log.clear()
    with open_checkpoint("hf://org/tiny") as remote, open_checkpoint(model) as local:
        assert torch.equal(remote.read(BIG), local.read(BIG))
    assert server.log == []


def test_without_the_hub_and_the_snapshot(server, monkeypatch):
    open_checkpoint("hf://org/tiny").close()  # leaves the config files of the commit in the cache
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    error = fails(f"hf://org/tiny@{COMMIT}", "cannot be reached (HF_HUB_OFFLINE is set)", "only a part")
    assert f"hf download org/tiny --revision {COMMIT}" in error.fix
    fails("hf://org/tiny", "cannot be reached", "not in the local Hub cache")


def test_a_server_gets_a_whole_local_folder_or_the_command_that_makes_one(server):
    open_checkpoint("hf://org/tiny").close()
    for path in ("hf://org/tiny", f"hf://org/tiny@{COMMIT}"):
        with pytest.raises(CheckpointError) as caught:
            resolve_path(path)
        assert "`hf download org/tiny" in caught.value.fix
    snapshot = snapshot_download("org/tiny")
    assert resolve_path("hf://org/tiny") == resolve_path(Path("hf://org/tiny")) == Path(snapshot)


# ---- failing ---------------------------------------------------------------------------------------------------------


NO_ADDRESSES = [
    *("hf:", "hf:/", "hf://", "hf:///", "hf:a/b", "hf://a", "hf://a/", "hf://a/b/c", "hf://a/b/c/d"),
    *("hf://a b", "hf://a/b@", "hf://@main", "hf://a/b@../c", "hf://-a/b", "hf://a/b\n"),
]


@pytest.mark.parametrize("name", NO_ADDRESSES)
@pytest.mark.parametrize("kind", [str, Path])
def test_names_that_no_repository_has(server, name, kind):
    assert fails(kind(name), "names no repository").fix == "write hf://org/name[@revision]"
    assert server.log == []


def test_missing_repository_revision_and_access(server):
    assert "hf auth login" in fails("hf://org/nothing", "has no model org/nothing, or it is private").fix
    assert "branch" in fails("hf://org/tiny@v9", "no revision 'v9'").fix
    server.gated.add("org/tiny")
    assert f"{server.url}/org/tiny" in fails("hf://org/tiny", "gated").fix


def test_a_server_that_ignores_ranges_is_not_downloaded_from(server):
    server.ignores_range = True
    error = fails("hf://org/tiny", "ignores the Range header", "status 200")
    assert "hf download org/tiny" in error.fix


def test_a_range_that_was_not_asked_for(server):
    server.shift = 8
    fails("hf://org/tiny", "sent the range 'bytes 8-", "asked for bytes 0-")


def test_a_connection_that_breaks_is_continued_where_it_broke(server, model):
    with open_checkpoint("hf://org/tiny") as remote, open_checkpoint(model) as local:
        info = remote.parts(BIG)["values"]
        server.log.clear()
        server.breaks = 2
        assert torch.equal(remote.read(BIG), local.read(BIG))
        half = info.begin + info.nbytes // 2
        assert [r.range[0] for r in server.log] == [info.begin, half, half + info.nbytes // 4]


def test_a_connection_that_only_breaks(server, monkeypatch):
    with open_checkpoint("hf://org/tiny") as remote:
        monkeypatch.setattr(hub.HubFiles, "_read_range", lambda *_: 0)
        with pytest.raises(CheckpointError, match=f"the connection broke 4 times while tensor {BIG}"):
            remote.read(BIG)


def test_truncated_remote_shard(server, model, tmp_path):
    server.truncated["model-00002-of-00002.safetensors"] = 200_000
    size = (model / "model-00002-of-00002.safetensors").stat().st_size
    fails("hf://org/tiny", "model-00002-of-00002.safetensors has 200000 bytes", f"lists {size}")
    folder = Path(shutil.copytree(model, tmp_path / "short"))
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:200_000])  # uploaded so
    server.repos["org/short"] = folder
    fails("hf://org/short", "model-00002-of-00002.safetensors is truncated")


@pytest.mark.parametrize("body", [b"<html>login</html>", b"[]", b"{}", b'{"id": "x", "sha": 5, "siblings": [{}]}', b""])
def test_what_is_not_the_hub(server, body):
    server.answers["/api/models/org/tiny"] = body
    assert "HF_ENDPOINT" in fails("hf://org/tiny").fix


@pytest.mark.parametrize(
    "edit", [lambda f: (f / "config.json").unlink(), lambda f: (f / "config.json").write_text("{")]
)
def test_broken_remote_config(server, model, tmp_path, edit: Callable[[Path], object]):
    folder = Path(shutil.copytree(model, tmp_path / "c"))
    edit(folder)
    server.repos["org/c"] = folder
    fails("hf://org/c", "config.json")
