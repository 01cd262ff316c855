"""Mutated headers, indexes, configs and bytes: a checkpoint opens, or it is refused with a `WorkbenchError`.

Never another exception, a hang (2 s of CPU time), a huge allocation (1 GiB above what the process had), or a tensor
other than the one stored. The examples are the same in every run; WORKBENCH_FUZZ_EXAMPLES=20000 tries so many new ones.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz_seeds import make_seeds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.dialects import DIALECTS
from workbench.checkpoints.lint import lint_checkpoint
from workbench.errors import WorkbenchError
from workbench.formats import QuantizedTensor

EXAMPLES = int(os.environ.get("WORKBENCH_FUZZ_EXAMPLES", "0"))
CPU_LIMIT_S = 2.0
MEMORY_LIMIT = 1 << 30
SEEDS = make_seeds()
SHARD = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


class Hang(BaseException):
    """Two seconds of CPU time went by: no `except Exception` may hide it."""


def fuzz(examples: int) -> Callable[[Any], Any]:
    return settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        deadline=None,  # `bounded` measures CPU time, which a busy machine does not change
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@contextmanager
def bounded() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang

    old_handler = signal.signal(signal.SIGVTALRM, stop)
    old_limit = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY_LIMIT, old_limit[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, old_limit)
        signal.signal(signal.SIGVTALRM, old_handler)


# ---- what is mutated, and how ----------------------------------------------------------------------------------------

numbers = st.sampled_from([-1, 0, 1, 2, 3, 7, 16, 63, 64, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**300])
words = st.one_of(
    st.sampled_from(
        ["", "Linear", "*", "re:(", "re:.*", "nan", "F32", "U8", "F8_E4M3", "int4", "../x", "\ud800", "\0", "²"]
    ),
    st.sampled_from(["fp4", "per_group", "modelopt", "quark", "gptq", "NVFP4", "model.layers.٣", "x" * 5000, "[" * 40]),
    st.text(max_size=6),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, st.floats(), words)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3), max_leaves=6
)


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value within a JSON document, itself left out."""
    inner = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    found = []
    for key, value in inner:
        found += [(*path, key), *places(value, (*path, key))]
    return found


def mutate(data: st.DataObject, document: Any) -> tuple[Any, set[Any]]:
    """One to three values replaced, removed, renamed, exchanged or added; with the first keys that were touched."""
    document, touched = copy.deepcopy(document), set()
    for _ in range(data.draw(st.integers(1, 3))):
        found = places(document)
        if not found:
            break
        path = data.draw(st.sampled_from(found))
        holder = document
        for key in path[:-1]:
            holder = holder[key]
        action = data.draw(st.sampled_from(["replace", "replace", "remove", "rename", "exchange", "add"]))
        touched.add(path[0])
        if action == "replace":
            holder[path[-1]] = data.draw(values)
        elif action == "remove":
            del holder[path[-1]]
        elif action == "exchange":
            other = data.draw(st.sampled_from(list(holder) if isinstance(holder, dict) else list(range(len(holder)))))
            holder[path[-1]], holder[other] = holder[other], holder[path[-1]]
            touched.add(path[0] if len(path) > 1 else other)
        elif isinstance(holder, dict):
            name = data.draw(words)
            holder[name] = holder.pop(path[-1]) if action == "rename" else data.draw(values)
            touched.add(path[0] if len(path) > 1 else name)
        else:
            holder.insert(0, data.draw(values))
    return document, touched


def read_all(path: Path) -> dict[str, torch.Tensor | QuantizedTensor]:
    """Everything in the checkpoint; both ways of opening and lint must succeed or raise a WorkbenchError."""
    found: dict[str, torch.Tensor | QuantizedTensor] = {}
    with bounded():
        for strict in (True, False):
            try:
                with open_checkpoint(path, strict=strict) as checkpoint:
                    checkpoint.fingerprint()
                    for entry in checkpoint.entries():
                        try:
                            value = checkpoint.read(entry.name)
                            dense = checkpoint.read_dense(entry.name)
                        except WorkbenchError:
                            continue
                        assert tuple(dense.shape) == entry.shape
                        if strict:
                            found[entry.name] = value
            except WorkbenchError as error:
                str(error).encode()  # printable
        try:
            for finding in lint_checkpoint(path).findings:
                f"{finding.message} {finding.tensor} {finding.file} {finding.fix}".encode()
        except WorkbenchError as error:
            str(error).encode()
    return found


def hash_of(tensor: torch.Tensor | QuantizedTensor) -> str:
    """Of a tensor's values, bit for bit."""
    dense = tensor.effective(torch.float32) if isinstance(tensor, QuantizedTensor) else tensor
    content = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
    return hashlib.sha256(content).hexdigest()


# ---- the tests -------------------------------------------------------------------------------------------------------


class Seeds:
    """What is mutated: the seeds as written, and the values of every entry. (No dataclass: hypothesis prints those.)"""

    def __init__(self, root: Path) -> None:
        self.paths = {name: seed.write(root / name) for name, seed in SEEDS.items()}
        self.truth = {n: {k: hash_of(v) for k, v in read_all(path).items()} for n, path in self.paths.items()}

    @contextmanager
    def mutant(self, data: st.DataObject) -> Iterator[tuple[str, Path]]:
        """A copy of one of them, gone when the example ends."""
        name = data.draw(st.sampled_from(sorted(self.paths)))
        with tempfile.TemporaryDirectory() as scratch:
            yield name, Path(shutil.copytree(self.paths[name], Path(scratch) / "c"))


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Seeds:
    return Seeds(tmp_path_factory.mktemp("seeds"))


def split_header(shard: Path) -> tuple[dict[str, Any], bytes]:
    content = shard.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_shard(shard: Path, header: bytes, body: bytes) -> None:
    shard.write_bytes(len(header).to_bytes(8, "little") + header + body)


def agrees_with_safetensors(path: Path) -> None:
    """What we take for a shard's tensors, the safetensors library takes for them too, bit for bit."""
    from workbench.checkpoints.files import read_folder

    try:
        with bounded():
            folder = read_folder(path)
    except WorkbenchError:
        return
    for file in folder.files:
        with safe_open(path / file, framework="pt") as theirs:
            ours = {name for name, info in folder.tensors.items() if info.file == file}
            assert set(theirs.keys()) == ours
            for name in ours:
                a, b = folder.load(name), theirs.get_tensor(name)
                assert (a.dtype, a.shape) == (b.dtype, b.shape)
                assert hash_of(a) == hash_of(b)
    folder.close()


def test_every_dialect_has_a_seed_and_every_seed_opens(seeds):
    assert {seed.dialect for seed in SEEDS.values()} >= set(DIALECTS)
    for name, path in seeds.paths.items():
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.dialect == SEEDS[name].dialect
            assert len(seeds.truth[name]) == len(checkpoint.entries()) > 2
            assert any(entry.quantized for entry in checkpoint.entries()) == (name != "plain")


@fuzz(150)
@given(data=st.data())
def test_headers(seeds, data):
    with seeds.mutant(data) as (name, path):
        header, body = split_header(path / SHARD)
        header, touched = mutate(data, header)
        write_shard(path / SHARD, json.dumps(header).encode(), body)
        agrees_with_safetensors(path)
        found = read_all(path)
        if "__metadata__" in touched:
            return
        with open_checkpoint(seeds.paths[name]) as original:
            for entry in original.entries():
                parts = {info.name for info in original.parts(entry.name).values()}
                if entry.name in found and not parts & touched and entry.name not in touched:
                    assert hash_of(found[entry.name]) == seeds.truth[name][entry.name], entry.name


@fuzz(150)
@given(data=st.data())
def test_bytes_of_a_shard(seeds, data):
    """Codes and scales, the header's text and its length; a shard cut short, or longer than it should be."""
    with seeds.mutant(data) as (name, path):
        content = bytearray((path / SHARD).read_bytes())
        length = int.from_bytes(content[:8], "little")
        regions = [(0, 8), (8, 8 + length), (8 + length, len(content))]
        changed = []
        for _ in range(data.draw(st.integers(1, 4))):
            first, last = data.draw(st.sampled_from(regions))
            position = data.draw(st.integers(first, last - 1))
            content[position] = data.draw(st.sampled_from([0, 0x7F, 0x80, 0xFF]) | st.integers(0, 255))
            changed.append(position)
        end = data.draw(st.just(len(content)) | st.integers(0, len(content) + 9))
        (path / SHARD).write_bytes(bytes(content[:end]) + bytes(max(0, end - len(content))))
        agrees_with_safetensors(path)
        found = read_all(path)
        if min(changed) < 8 + length:
            return
        with open_checkpoint(seeds.paths[name]) as original:
            for entry in original.entries():
                infos = [i for i in original.parts(entry.name).values() if i.file == SHARD]
                if entry.name in found and not any(i.begin <= p < i.end for i in infos for p in changed):
                    assert hash_of(found[entry.name]) == seeds.truth[name][entry.name], entry.name


@fuzz(80)
@given(data=st.data())
def test_indexes(seeds, data):
    with seeds.mutant(data) as (name, path):
        index, _ = mutate(data, json.loads((path / INDEX).read_text()))
        (path / INDEX).write_text(json.dumps(index))
        found = read_all(path)
        for key, value in found.items():
            assert hash_of(value) == seeds.truth[name][key], key
        named = index["weight_map"].values() if found else ()
        if {SHARD, SHARD.replace("1-", "2-")} <= set(named):  # a shard that it does not name is not read
            assert set(found) == set(seeds.truth[name])


@fuzz(300)
@given(data=st.data())
def test_configs(seeds, data):
    with seeds.mutant(data) as (name, path):
        config = json.loads((path / "config.json").read_text())
        block, rest = config.pop("quantization_config", {}), config
        if data.draw(st.booleans()) or not block:
            rest, _ = mutate(data, rest)
        if block:
            block, _ = mutate(data, block)
            rest["quantization_config"] = block
        (path / "config.json").write_text(json.dumps(rest))
        if data.draw(st.integers(0, 9)) == 0:
            side, _ = mutate(data, {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}})
            (path / "hf_quant_config.json").write_text(json.dumps(side))
        found = read_all(path)
        if not SEEDS[name].config_decides:
            for key, value in found.items():
                assert hash_of(value) == seeds.truth[name][key], key


BOMBS = {
    "deep": "[" * 200_000 + "]" * 200_000,
    "digits": "9" * 200_000,
    "keys": "{" + ",".join(f'"k{i}": 1' for i in range(60_000)) + "}",
    "twice": "{" + ",".join(f'"k{i}": 1' for i in range(60_000)) + ', "k59999": 2}',
    "dimensions": '{"dtype": "U8", "shape": ['
    + ",".join(["9223372036854775807"] * 20_000)
    + '], "data_offsets": [0, 1]}',
    "name": '"' + "a." * 200_000 + '"',
    "surrogate": '"\\ud800"',
}


@pytest.mark.parametrize("bomb", sorted(BOMBS))
@pytest.mark.parametrize("place", ["row", "name", "header", "config", "block", "index", "weight_map"])
def test_bombs(seeds, tmp_path, bomb, place):
    path = Path(shutil.copytree(seeds.paths["modelopt-nvfp4"], tmp_path / "c"))
    text = BOMBS[bomb]
    if place in ("row", "name", "header"):
        header, body = split_header(path / SHARD)
        key = text if place == "name" and text.startswith('"') else '"extra"'
        inner = json.dumps(header)[:-1] + f", {key}: {text}}}"
        write_shard(path / SHARD, (text if place == "header" else inner).encode(), body)
    elif place in ("config", "block"):
        block = f'{{"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": {text}}}'
        (path / "config.json").write_text(text if place == "config" else f'{{"quantization_config": {block}}}')
    else:
        (path / INDEX).write_text(text if place == "index" else f'{{"weight_map": {text}}}')
    read_all(path)


def test_safetensors_refuses_what_we_refuse_in_a_header(seeds, tmp_path):
    """The comparison above can fail: the library does read these files."""
    path = Path(shutil.copytree(seeds.paths["plain"], tmp_path / "c"))
    with safe_open(path / SHARD, framework="pt") as theirs:
        assert list(theirs.keys())
    header, body = split_header(path / SHARD)
    first = next(k for k in header if k != "__metadata__")
    header[first]["shape"] = [1]
    write_shard(path / SHARD, json.dumps(header).encode(), body)
    with pytest.raises(SafetensorError), safe_open(path / SHARD, framework="pt"):
        pass
    assert read_all(path) == {}
