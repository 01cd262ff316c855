"""The kernels that convert a GPU's weights are made ready beside the reading, and are the ones that the load runs.

No GPU is needed: the launches are taken down as Triton's cache would know them, and the thread's work is a stand-in's.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from workbench.mini_models import model_path

from workbench.formats import QuantizedTensor
from workbench.serving.vllm_plugin import conversion, preparation
from workbench.serving.vllm_plugin.meter import LoadMeter
from workbench.serving.vllm_plugin.preparation import Launch, Preparation, launch_stand_ins, planned_launches, smallest
from workbench.serving.vllm_plugin.settings import ModulePlan, PluginSettings, plan_modules

pytestmark = pytest.mark.vllm
CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
NAME = "model.layers.0.mlp.experts.{}.up_proj.weight"
REQUANT: dict[str, Any] = {"backend": "requant", "format": "mxfp4"}
Keys = set[tuple[Any, ...]]


# ---- the same compiled kernels ---------------------------------------------------------------------------------------


class TakenDown:
    """In place of a kernel: keeps of each launch what Triton tells compiled kernels apart by, and runs nothing."""

    def __init__(self, kernel: Any, keys: Keys) -> None:
        from triton.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature
        from triton_targets import TARGETS

        self.name, self.keys = kernel.fn.__name__, keys
        self.bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(TARGETS["sm_90"]))

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            _, specialization, options = self.bind(*arguments, **named)
            self.keys.add((self.name, *map(str, specialization), str(sorted(options.items()))))

        return launch


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Keys:
    """Filled by every launch of the conversion's kernels; tensors of the CPU count as a GPU's."""
    pytest.importorskip("triton", minversion="3.9")
    from workbench.kernels import triton_dequantize, triton_dispatch, triton_requant

    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "kernels")
    found: Keys = set()
    for module, name in (
        (triton_requant, "_requant_kernel"),
        (triton_requant, "_table_kernel"),
        (triton_dequantize, "_fp4_kernel"),
    ):
        monkeypatch.setattr(module, name, TakenDown(getattr(module, name), found))
    monkeypatch.setattr(triton_dispatch, "_on_triton", lambda t: True)
    monkeypatch.setattr(conversion, "_on_gpu", lambda t: True)
    return found


def stored(n: int, k: int, format: str = "nvfp4") -> QuantizedTensor:
    nvfp4 = format == "nvfp4"
    scales = torch.full((n, k // (16 if nvfp4 else 32)), 0x30, dtype=torch.uint8)
    return QuantizedTensor(
        format=format,
        codes=torch.zeros((n, k // 2), dtype=torch.uint8),
        block_scales=scales.view(torch.float8_e4m3fn) if nvfp4 else scales,
        global_scale=torch.tensor(0.5) if nvfp4 else None,
        shape=(n, k),
    )


def taken(keys: Keys) -> Keys:
    found = set(keys)
    keys.clear()
    return found


def run_real(count: int, n: int, k: int) -> None:
    """As the load converts `count` matrices `[n, k]`."""
    from workbench.kernels.tables import ScaleRule

    from workbench.serving.vllm_plugin.together import requantize_together

    if count > 1:
        members = {NAME.format(i): stored(n, k) for i in range(count)}
        assert len(requantize_together(members, ScaleRule.EVEN, LoadMeter(CPU), name=NAME)) == count
        return
    plan = ModulePlan("m", "nvfp4", "mxfp4", "mxfp4", False)
    conversion.convert_tensor(NAME, stored(n, k), plan, PluginSettings(checkpoint="c", **REQUANT), LoadMeter(CPU))


# N and K of experts and of attention; then blocks of 32 weights: 1; few; odd; 8, which an even count alone makes a
# multiple of 16; the first that are worth tables, and more that are divisible by 16, by 8 and by nothing.
SHAPES = [(768, 2048), (2048, 768), (1, 32), (3, 32), (17, 32), (33, 64), (8, 32), (24, 32), (256, 512), (4104, 32)]
SHAPES += [(4095, 32), (4097, 32), (8198, 32), (5001, 32)]


@pytest.mark.parametrize("count", [1, 2, 3, 16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_stand_in_runs_the_compiled_kernels_of_the_weights(count: int, n: int, k: int, keys: Keys) -> None:
    run_real(count, n, k)
    expected = taken(keys)
    launch_stand_ins([Launch("nvfp4", "mxfp4", count, n * k // 32)], CPU, "", torch.bfloat16)
    assert taken(keys) == expected
    assert len(expected) == (2 if n * k // 16 >= 8192 else 1)  # with the tables' kernel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_stand_in_is_decoded_by_the_compiled_kernel_of_the_weights(
    n: int, k: int, format: str, dtype: torch.dtype, keys: Keys
) -> None:
    conversion.decode_tensor(NAME, stored(n, k, format), dtype, LoadMeter(CPU))
    expected = taken(keys)
    launch_stand_ins([Launch(format, format, 1, n * k // 32)], CPU, "", dtype)
    assert taken(keys) == expected
    assert len(expected) == 1


def test_other_properties_are_other_kernels(keys: Keys) -> None:
    """Or else the tests above could not fail."""
    found = []
    for count, n in ((1, 4096), (1, 4097), (1, 16), (1, 17), (1, 1), (2, 4096), (2, 4100), (3, 4104), (2, 16)):
        run_real(count, n, 32)
        found.append(frozenset(taken(keys)))
    assert len(set(found)) == len(found)


def test_a_stand_in_is_small() -> None:
    pytest.importorskip("triton")
    for count, (n, k) in itertools.product((1, 3, 64), [*SHAPES, (163840, 7168)]):
        launch = smallest(Launch("nvfp4", "mxfp4", count, n * k // 32))
        assert launch.blocks <= 4096 + 15
        assert launch.count <= 16
    assert smallest(Launch("nvfp4", "mxfp4", 64, 768 * 2048 // 32)) == Launch("nvfp4", "mxfp4", 2, 4096)


# ---- what a load launches --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from workbench.checkpoints.convert import quantize_checkpoint

    folder: Path = tmp_path_factory.mktemp("preparation") / "nvfp4"
    quantize_checkpoint(model_path(), folder, format="nvfp4", dialect="modelopt")
    return folder


def launches_of(folder: Path, **settings: Any) -> frozenset[Launch]:
    from workbench.checkpoints import open_checkpoint

    asked = PluginSettings(checkpoint=str(folder), **settings)
    with open_checkpoint(folder) as opened:
        return planned_launches(opened, plan_modules(opened, asked), asked)


def loader_for(folder: Path, *, packed: bool = True, **settings: Any) -> Any:
    """A loader whose modules are packed as vLLM's MLA models are: all but kv_b_proj and lm_head."""
    from vllm.config.load import LoadConfig

    from workbench.checkpoints import open_checkpoint
    from workbench.serving.vllm_plugin.loader import WorkbenchModelLoader

    asked = PluginSettings(checkpoint=str(folder), **settings)
    loader = WorkbenchModelLoader(LoadConfig(load_format="workbench", model_loader_extra_config=asked.to_dict()))
    if packed:
        with open_checkpoint(folder) as opened:
            modules = {e.module for e in opened.entries() if e.quantized and e.layer >= 0}
        loader._config = SimpleNamespace(
            taken={m for m in modules if not m.endswith("kv_b_proj")}, launches=launches_of(folder, **settings)
        )
    return loader


def weights_of(loader: Any) -> Iterator[tuple[str, torch.Tensor]]:
    model_config: Any = SimpleNamespace(dtype=torch.bfloat16)
    yield from loader.get_all_weights(model_config, torch.nn.Linear(1, 1))


@pytest.mark.parametrize("settings", [REQUANT, {**REQUANT, "rule": "floor"}, {"backend": "emulation"}, {}])
def test_the_planned_launches_are_those_of_the_load(
    settings: dict[str, Any], checkpoint: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench.serving.vllm_plugin import loader as module
    from workbench.serving.vllm_plugin import together

    def as_on_a_gpu(entries: Any, joins: Any, at_most: int) -> Any:
        return together.batches(entries, joins, together.AT_MOST if settings.get("backend") == "requant" else 1)

    monkeypatch.setattr(module, "batches", as_on_a_gpu)
    list(weights_of(loader_for(checkpoint, packed=bool(settings), **settings)))
    expected = taken(keys)
    launch_stand_ins(launches_of(checkpoint, **settings), CPU, settings.get("rule", ""), torch.bfloat16)
    assert taken(keys) == expected
    assert expected


def test_what_runs_no_kernel_of_ours_is_not_prepared(checkpoint: Path, tmp_path: Path) -> None:
    from workbench.checkpoints.convert import quantize_checkpoint

    assert {(e.stored, e.weight) for e in launches_of(checkpoint, **REQUANT)} == {
        ("nvfp4", "mxfp4"),
        ("mxfp4", "mxfp4"),
    }
    searched = launches_of(checkpoint, **REQUANT, rule="mse")  # no kernel requantizes so; decoded is what came of it
    assert {(e.stored, e.weight) for e in searched} == {("mxfp4", "mxfp4")}
    assert not launches_of(model_path())
    packed = tmp_path / "compressed"
    quantize_checkpoint(model_path(), packed, format="nvfp4", dialect="compressed_tensors")
    assert not launches_of(packed)


# ---- beside the load -------------------------------------------------------------------------------------------------


def test_only_a_cuda_device_with_launches_starts_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(preparation, "Preparation", started.append)
    launch = Launch("nvfp4", "mxfp4", 1, 4096)
    for launches, device in (([launch], CPU), ([launch], torch.device("meta")), ([], GPU)):
        assert preparation.prepare(launches, device, "", torch.bfloat16) is None
    assert not started
    monkeypatch.setattr(preparation.importlib.util, "find_spec", lambda name: object())
    preparation.prepare([launch], GPU, "", torch.bfloat16)
    assert len(started) == 1


def test_a_load_on_a_cpu_prepares_nothing(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.serving.vllm_plugin import loader as module

    assert module.device_of_worker() == CPU
    monkeypatch.setattr(preparation, "Preparation", lambda work: pytest.fail("a thread was started"))
    for settings, packed in ((REQUANT, True), ({}, False)):
        loader = loader_for(checkpoint, packed=packed, **settings)
        for _ in weights_of(loader):
            pass
        record = loader._meter.record()
        assert (record["prepare_s"], record["prepare_waited_s"]) == (0.0, 0.0)


class Load:
    """A load whose preparation is `work`: what happened, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, work: Callable[[Load], None]) -> None:
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

        from workbench.checkpoints import Checkpoint
        from workbench.serving.vllm_plugin import loader as module

        self.events: list[str] = []
        self.read = threading.Event()
        self.loader = loader_for(folder, **REQUANT)
        read, enter = Checkpoint.read, LoadMeter._enter

        def prepare(launches: Any, device: torch.device, rule: str, dtype: torch.dtype) -> Preparation:
            assert device == GPU
            assert launches == self.loader._config.launches
            assert (rule, dtype) == ("", torch.bfloat16)
            self.events.append("prepare")
            return Preparation(lambda: work(self))

        def reads(opened: Any, name: str) -> Any:
            self.events.append("read")
            self.read.set()
            return read(opened, name)

        def enters(counting: LoadMeter, name: str) -> Any:
            self.events.append("convert")
            return enter(counting, name)

        def build(loader: Any, vllm_config: Any, model_config: Any, prefix: str) -> Any:
            self.events.append("build")
            for _ in weights_of(loader):
                pass
            return torch.nn.Linear(1, 1)

        monkeypatch.setattr(module, "prepare", prepare)
        monkeypatch.setattr(module, "device_of_worker", lambda: GPU)
        monkeypatch.setattr(module.cpu, "prepare", lambda dtype: None)
        monkeypatch.setattr(Checkpoint, "read", reads)
        monkeypatch.setattr(LoadMeter, "_enter", enters)
        monkeypatch.setattr(DefaultModelLoader, "load_model", build)

    def run(self) -> dict[str, Any]:
        config = self.loader._config
        config.get_name = lambda: "workbench"
        asked: Any = SimpleNamespace(quant_config=config)
        model_config: Any = SimpleNamespace(dtype=torch.bfloat16)
        self.loader.load_model(vllm_config=asked, model_config=model_config)
        record: dict[str, Any] = self.loader._meter.record()
        return record


def test_it_starts_before_the_model_is_built_and_ends_before_the_first_conversion(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(load: Load) -> None:
        assert load.read.wait(60)  # files are read meanwhile, or this never ends
        time.sleep(0.2)
        load.events.append("prepared")

    load = Load(monkeypatch, checkpoint, work)
    record = load.run()
    assert load.events[:2] == ["prepare", "build"]
    assert load.events.index("read") < load.events.index("prepared") < load.events.index("convert")
    assert load.events.count("prepare") == 1
    assert record["prepare_s"] > 0.19
    first = next(iter(record["converted"].values()))
    assert first["seconds"] >= record["prepare_waited_s"] - 1e-3


def test_only_the_first_conversion_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    beside = Preparation(lambda: assert_set(release))
    waits, wait = [], beside.wait

    def waits_a_while() -> None:
        waits.append(threading.Timer(0.2, release.set))
        waits[-1].start()
        wait()

    monkeypatch.setattr(beside, "wait", waits_a_while)
    counting = LoadMeter(CPU, beside)
    for layer in range(2):
        with counting.converting(f"model.layers.{layer}.mlp.up_proj.weight"):
            pass
    counting.finish()
    record = counting.record()
    assert len(waits) == 1
    assert record["prepare_waited_s"] > 0.19
    assert record["prepare_s"] > 0.19
    first, second = record["converted"].values()
    assert first["seconds"] >= record["prepare_waited_s"] - 1e-3 > second["seconds"]
    assert record["convert_s"] == pytest.approx(first["seconds"] + second["seconds"], abs=1e-3)


def assert_set(event: threading.Event) -> None:
    assert event.wait(60)


def test_its_error_is_told_and_ends_no_load(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def work(load: Load) -> None:
        raise RuntimeError("no kernel image is available")

    load = Load(monkeypatch, checkpoint, work)
    with caplog.at_level(logging.WARNING, "vllm.workbench"), capturable("vllm.workbench"):
        record = load.run()
    assert record["prepare_error"] == "RuntimeError: no kernel image is available"
    assert record["converted"]
    assert "could not be made ready ahead: RuntimeError: no kernel image" in caplog.text


@contextlib.contextmanager
def capturable(name: str) -> Iterator[None]:
    """vLLM's loggers hand nothing on to the root's handlers."""
    chain = [logging.getLogger(part) for part in ("vllm", name)]
    before = [log.propagate for log in chain]
    for log in chain:
        log.propagate = True
    try:
        yield
    finally:
        for log, propagate in zip(chain, before, strict=True):
            log.propagate = propagate


def test_its_error_is_recorded_where_nothing_was_converted() -> None:
    def work() -> None:
        raise RuntimeError("no kernel image is available")

    counting = LoadMeter(CPU, Preparation(work))
    counting.finish()
    record = counting.record()
    assert record["prepare_error"] == "RuntimeError: no kernel image is available"
    assert record["prepare_waited_s"] == record["convert_s"] == 0
