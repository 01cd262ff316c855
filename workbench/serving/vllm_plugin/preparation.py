"""Makes a GPU's conversion kernels ready while the model is built and its files are read. Imports no vLLM.

    launches = planned_launches(checkpoint, plans, settings)
    preparation = prepare(launches, device, settings.rule, torch.bfloat16)     # None: nothing to prepare
    meter = LoadMeter(device, preparation)         # its first conversion waits for the rest and counts the waiting

A kernel's first launch in a process compiles it, or loads it from Triton's cache: about a second before the first
tensor is converted. So a thread converts small stand-ins by the code that converts the weights. Triton compiles
a kernel anew for other properties of its arguments, not for other sizes: whether a count is divisible by 16 or is 1,
whether tables are worth their making. A stand-in shares these with the weights it stands for.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .meter import LoadMeter
from .settings import DECODED_AT_LOAD, ModulePlan, PluginSettings

if TYPE_CHECKING:
    from workbench.checkpoints import Checkpoint, Entry

logger = logging.getLogger("vllm.workbench")  # not `init_logger`: this module imports no vLLM

_PLACE = "the stand-in of a preparation"
_DIVISOR = 16  # Triton compiles apart what is a multiple of it


@dataclass(frozen=True, slots=True, order=True)
class Launch:
    """One kind of call. stored, weight: formats before and after; equal: the tensor is decoded. count: matrices that go
    together; blocks: of 32 weights, in each."""

    stored: str
    weight: str
    count: int
    blocks: int


class Preparation:
    """`work` in a thread that starts now. Once it has ended, seconds: how long it took; error: what it raised, "" where
    it went well. It ends no load: the conversion that needs what failed says so itself, by its tensor."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.seconds = 0.0
        self.error = ""
        self._work = work
        self._thread = threading.Thread(target=self._run, name="workbench-preparation")
        self._thread.start()

    def wait(self) -> None:
        """Until `work` has ended."""
        self._thread.join()

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            self._work()
        except BaseException as error:
            self.error = f"{type(error).__name__}: {error}"
            logger.warning("the kernels that convert the weights could not be made ready ahead: %s", self.error)
        self.seconds = time.perf_counter() - started


def prepare(launches: Collection[Launch], device: torch.device, rule: str, dtype: torch.dtype) -> Preparation | None:
    """Starts the launches on a CUDA `device`; None on another, without Triton, or where there are none. rule: of
    requantization, "" for the format's own; dtype: of decoded weights."""
    if not launches or device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())  # of this thread; a new one starts with the first

    def work() -> None:
        torch.cuda.set_device(device)
        launch_stand_ins(launches, device, rule, dtype)
        torch.cuda.synchronize(device)

    return Preparation(work)


def planned_launches(
    checkpoint: Checkpoint, plans: Mapping[str, ModulePlan], settings: PluginSettings
) -> frozenset[Launch]:
    """What a load on a GPU launches for four-bit weights: NVFP4 to MXFP4, alone and together, and decoding.

    The plan is known before the model is: decoded are kv_b_proj and what lies outside the decoder layers (lm_head).
    Left out are other conversions, and NVFP4 of compressed-tensors, whose float64 global scales take the general way.
    """
    from workbench.formats import get_format
    from workbench.kernels.tables import MXFP4_RULES

    from .together import AT_MOST, batches

    fused = settings.format == "mxfp4" and get_format("mxfp4").rule(settings.rule or None) in MXFP4_RULES
    doubles = checkpoint.dialect == "compressed_tensors"

    def joins(entry: Entry) -> bool:
        return entry.expert >= 0 and bool(entry.projection) and entry.module in plans

    def kinds(entry: Entry) -> Iterator[tuple[str, str]]:
        plan = plans.get(entry.module) if entry.projection else None
        converted = plan is not None and plan.converts(settings)
        weight = plan.weight if plan is not None and converted else entry.format
        if converted and fused and (entry.format, weight) == ("nvfp4", "mxfp4") and not doubles:
            yield "nvfp4", "mxfp4"
        if (plan is None or _is_decoded(entry)) and (weight == "mxfp4" or (weight == "nvfp4" and not doubles)):
            yield weight, weight

    found: set[Launch] = set()
    for batch in batches(checkpoint.entries(), joins, AT_MOST if settings.backend == "requant" else 1):
        fours = [e for e in batch if e.quantized and len(e.shape) == 2 and e.shape[1] % 32 == 0]
        calls = Counter((kind, e.shape) for e in fours for kind in kinds(e))
        for (kind, (n, k)), count in calls.items():
            together = count if kind[0] != kind[1] else 1
            found.add(Launch(*kind, together, n * k // 32))
    return frozenset(found)


def _is_decoded(entry: Entry) -> bool:
    return entry.layer < 0 or entry.module.endswith(DECODED_AT_LOAD)


# ---- stand-ins -------------------------------------------------------------------------------------------------------


def launch_stand_ins(launches: Collection[Launch], device: torch.device, rule: str, dtype: torch.dtype) -> None:
    """Converts or decodes a stand-in on `device` for each of `launches`, one for all that launch alike."""
    from workbench.formats import get_format

    from .conversion import convert_tensor, decode_tensor
    from .together import requantize_together

    meter = LoadMeter(device, watch_memory=False)
    settings = PluginSettings(checkpoint="", backend="requant", format="mxfp4", rule=rule)
    plan = ModulePlan(_PLACE, "nvfp4", "mxfp4", "mxfp4", False)
    for launch in sorted({smallest(launch) for launch in launches}):
        members: dict[str, Any] = {f"{_PLACE} {i}": _stand_in(launch) for i in range(launch.count)}
        if launch.count > 1:
            requantize_together(members, get_format("mxfp4").rule(rule or None), meter, name=_PLACE)
            continue
        for name, stored in members.items():
            if launch.stored == launch.weight:
                decode_tensor(name, stored, dtype, meter)
            else:
                convert_tensor(name, stored, plan, settings, meter)


def smallest(launch: Launch) -> Launch:
    """The smallest launch that runs the same compiled kernels: with tables or without, and each count that they get
    divisible by 16 or not."""
    from workbench.kernels.triton_requant import TABLE_WORTH

    tabled = TABLE_WORTH // 2  # blocks of two scales each
    blocks = min(launch.blocks, tabled + launch.blocks % _DIVISOR)
    if launch.blocks < tabled:
        blocks = min(launch.blocks, _DIVISOR + launch.blocks % _DIVISOR)
    divisible = launch.count * launch.blocks % _DIVISOR == 0
    count = launch.count
    if count > 1:
        count = next(c for c in range(2, count + 1) if (c * blocks % _DIVISOR == 0) == divisible)
    return Launch(launch.stored, launch.weight, count, blocks)


def _stand_in(launch: Launch) -> Any:
    """Zeros `[blocks, 32]`. Dtypes are spelled out: the thread that builds the model changes the default."""
    from workbench.formats import QuantizedTensor

    n, nvfp4 = launch.blocks, launch.stored == "nvfp4"
    codes = torch.zeros((n, 16), dtype=torch.uint8, device="cpu")
    one = 0x38 if nvfp4 else 127  # 1.0 in E4M3 and E8M0
    scales = torch.full((n, 2 if nvfp4 else 1), one, dtype=torch.uint8, device="cpu")
    return QuantizedTensor(
        format=launch.stored,
        codes=codes,
        block_scales=scales.view(torch.float8_e4m3fn) if nvfp4 else scales,
        global_scale=torch.ones((), dtype=torch.float32, device="cpu") if nvfp4 else None,
        shape=(n, 32),
    )
