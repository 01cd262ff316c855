"""The arms of one matrix as values, a few rows at a time: stored, dense, or rounded here.

    first = side_of(checkpoint.read(name), "model.layers.1...weight")
    second = RoundedSide(first, "mxfp4", "even", name)
    a_nk, steps = first.rows(0, 64, None)
    b_nk, steps = second.rows(0, 64, a_nk)

A pass over a matrix then holds its stored bytes and some megabytes of values, however large the matrix is. Formats
whose scale needs the whole matrix (a global scale) take it from a first look at every row; where a rule needs more than
that (its result depends on the dtype that holds all values, say), the matrix is rounded at once and kept packed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from workbench.errors import FormatError
from workbench.formats import QuantizedTensor, get_format, quantize
from workbench.kernels.cpu_errors import scale_values
from workbench.kernels.elements import ELEMENTS
from workbench.kernels.tables import MXFP4_RULES, ScaleRule

CHUNK_ELEMENTS = 1 << 17  # values in flight for each arm of a thread: 512 KiB, within the second-level cache
DEVICE_CHUNK_ELEMENTS = 1 << 24  # on a GPU, where a launch costs more than a cache gains: 64 MiB an arm

_KERNELS = {"nvfp4": (ScaleRule.AMAX,), "mxfp4": MXFP4_RULES}  # rules whose kernels round on a GPU, to equal bits
_BY_ROWS = {"nvfp4": (ScaleRule.AMAX, ScaleRule.FOUR_OVER_SIX, ScaleRule.MSE, ScaleRule.MODELOPT)}


class Side(Protocol):
    """One arm's values of a matrix `[N, K]`.

    format: "" for values that no format rounded. element: of the format ("" where errors are not attributed). block:
    elements of K that share a scale, 0: a row. row_multiple: rows may be asked for from a multiple of it on.
    """

    @property
    def format(self) -> str: ...
    @property
    def element(self) -> str: ...
    @property
    def block(self) -> int: ...
    @property
    def row_multiple(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def device(self) -> torch.device: ...

    def rows(self, start: int, stop: int, base: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Values `[stop - start, K]` and, with an `element`, what one unit of each block decodes to (float32, flat).

        base: the same rows of the side that this one is made from; None: they are read again.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class DenseSide:
    """Values as they are, any float dtype."""

    values: Tensor
    format: str = ""
    element: str = ""
    block: int = 1
    row_multiple: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def device(self) -> torch.device:
        return self.values.device

    def rows(self, start: int, stop: int, base: Tensor | None) -> tuple[Tensor, Tensor | None]:
        part = self.values.reshape(-1, self.values.shape[-1])[start:stop]
        return part if part.dtype in (torch.float32, torch.float64) else part.float(), None


@dataclasses.dataclass(frozen=True, slots=True)
class StoredSide:
    """A quantized matrix, decoded rows by rows."""

    tensor: QuantizedTensor

    @property
    def format(self) -> str:
        return self.tensor.format

    @property
    def element(self) -> str:
        return attributed_element(self.tensor)

    @property
    def block(self) -> int:
        return max(0, (self.tensor.block or (self.tensor.spec.rows, self.tensor.spec.block))[1])

    @property
    def row_multiple(self) -> int:
        rows = (self.tensor.block or (self.tensor.spec.rows, self.tensor.spec.block))[0]
        whole = len(self.tensor.shape) != 2 or rows == 0
        return math.prod(self.tensor.shape[:-1]) if whole else max(1, rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def device(self) -> torch.device:
        return self.tensor.codes.device

    def rows(self, start: int, stop: int, base: Tensor | None) -> tuple[Tensor, Tensor | None]:
        part = _slice_rows(self.tensor, start, stop)
        values = part.effective().reshape(-1, self.tensor.shape[-1])
        return values, steps_of(part) if self.element else None


class RoundedSide:
    """`of`, rounded to a format under a rule, as the requant backend does it. Raises FormatError as `quantize` does.

    On a GPU the kernels round there, which give the reference's bits; a rule that only plain torch has is rounded on
    the CPU, because CUDA's arithmetic need not be the CPU's (a quotient by a number is a product by its reciprocal).
    """

    def __init__(self, of: Side, format: str, rule: str | None, name: str) -> None:
        if 0 in of.shape:
            raise FormatError(f"{name}: is empty (shape {of.shape})", fix="exclude this tensor (--exclude)")
        spec = get_format(format)
        self.format, self._of, self._spec = format, of, spec
        self._rule, self._block = spec.rule(rule), spec.resolve_block(None)
        self.shape, self.device = of.shape, of.device
        self._rounds_on = of.device if self._rule in _KERNELS.get(format, ()) else torch.device("cpu")
        self._stored: StoredSide | None = None
        self._global: Tensor | None = None
        if not self._by_rows():
            whole = torch.cat([part.cpu() for part in each_chunk(of)]).reshape(self.shape)
            self._stored = StoredSide(on_device(quantize(whole, format, rule, name=name), of.device))
        elif spec.shared_scale is not None:
            amax = torch.stack([part.abs().amax() for part in each_chunk(of)]).amax().float()
            self._global = spec.shared_scale(self._rule, amax.cpu()).to(self._rounds_on)
        rows, columns = self._block
        if self._stored is None and columns and self.shape[-1] % columns:
            raise FormatError(
                f"{name}: K = {self.shape[-1]} is not a multiple of {format}'s block of {columns} (shape {self.shape})",
                fix="exclude this tensor (--exclude), or choose a format whose block divides K",
            )
        self.element = self._stored.element if self._stored else (spec.element if _is_float(spec.element) else "")
        self.block = self._stored.block if self._stored else columns
        self.row_multiple = self._stored.row_multiple if self._stored else max(1, rows)

    def rows(self, start: int, stop: int, base: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self._stored is not None:
            return self._stored.rows(start, stop, None)
        if base is None:
            base = self._of.rows(start, stop, None)[0]
        parts = self._spec.quantize(base.to(self._rounds_on), self._rule, self._block, self._global)
        rounded = QuantizedTensor(
            format=self.format,
            codes=parts.codes,
            block_scales=parts.block_scales,
            global_scale=parts.global_scale,
            shape=tuple(base.shape),
            block=self._block if self._spec.block < 0 or self._spec.rows < 0 else None,
        )
        rounded = on_device(rounded, self.device)
        return rounded.dequantize(), steps_of(rounded) if self.element else None

    def _by_rows(self) -> bool:
        """Whether rounding some rows alone gives what rounding the matrix gives."""
        if len(self.shape) != 2:
            return False
        if self._spec.scale == "e8m0":
            return True
        return self._rule in _BY_ROWS.get(self.format, ())


def side_of(tensor: QuantizedTensor | Tensor) -> Side:
    """The side of what `Checkpoint.read` gave."""
    return StoredSide(tensor) if isinstance(tensor, QuantizedTensor) else DenseSide(tensor)


def on_device(tensor: QuantizedTensor, device: torch.device) -> QuantizedTensor:
    """The tensor with what its values need on `device`; itself where it lies there."""
    return tensor if tensor.codes.device == device else with_parts(tensor, lambda part: part.to(device))


def with_parts(tensor: QuantizedTensor, move: Callable[[Tensor], Tensor]) -> QuantizedTensor:
    """The tensor with each tensor that its values need through `move`."""
    fields = ("codes", "block_scales", "global_scale", "zero_points", "group_index", "pre_quant_scale")
    parts = ((field, getattr(tensor, field)) for field in fields)
    moved: dict[str, Any] = {field: move(part) for field, part in parts if part is not None}
    return dataclasses.replace(tensor, **moved)


def each_chunk(side: Side) -> Iterator[Tensor]:
    """All values of a side, some rows at a time."""
    elements = CHUNK_ELEMENTS if side.device.type == "cpu" else DEVICE_CHUNK_ELEMENTS
    for start, stop in chunk_rows(side.shape, side.row_multiple, elements):
        yield side.rows(start, stop, None)[0]


def chunk_rows(shape: tuple[int, ...], multiple: int, elements: int = CHUNK_ELEMENTS) -> list[tuple[int, int]]:
    """[start, stop) of the rows of a matrix, in chunks of about `elements` values and whole multiples of rows."""
    rows, k = math.prod(shape[:-1]), max(1, shape[-1])
    step = multiple * max(1, -(-max(1, elements // k) // multiple))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def largest_code(element: str) -> float:
    """The largest magnitude of an element format, in steps."""
    return ELEMENTS[element].max


def attributed_element(tensor: QuantizedTensor) -> str:
    """The element format where an error splits into scale, element, saturation and underflow, else "".

    Float elements with a scale for some or all of a row: not integers (their zero points and asymmetric ends make
    other parts), not blocks of several rows, not reordered or rescaled inputs.
    """
    rows, columns = tensor.block or (tensor.spec.rows, tensor.spec.block)
    plain = tensor.zero_points is None and tensor.group_index is None and tensor.pre_quant_scale is None
    fits = rows == 1 and (columns == 0 or tensor.shape[-1] % max(1, columns) == 0)
    return tensor.spec.element if plain and fits and _is_float(tensor.spec.element) else ""


def steps_of(tensor: QuantizedTensor) -> Tensor:
    """What one unit of a block's codes decodes to: block scale times global, float32, flat."""
    values = scale_values(tensor.block_scales)
    if tensor.global_scale is not None:
        values = (values.double() * tensor.global_scale.double()).float()
    return values.reshape(-1)


def _is_float(element: str) -> bool:
    return ELEMENTS[element].mantissa_bits > 0


def _slice_rows(tensor: QuantizedTensor, start: int, stop: int) -> QuantizedTensor:
    """Rows [start, stop) of a matrix; the tensor itself where that is all of it."""
    if len(tensor.shape) != 2 or (start == 0 and stop == tensor.shape[0]):
        return tensor
    rows = (tensor.block or (tensor.spec.rows, tensor.spec.block))[0]
    first, last = (start, stop) if rows == 1 else (start // rows, -(-stop // rows))
    g = tensor.global_scale
    per_row = g is not None and g.dim() >= 1 and g.shape[0] == tensor.shape[0] and g.numel() > 1
    return dataclasses.replace(
        tensor,
        codes=tensor.codes[start:stop],
        block_scales=tensor.block_scales[first:last],
        global_scale=g[start:stop] if per_row and g is not None else g,
        zero_points=None if tensor.zero_points is None else tensor.zero_points[first:last],
        shape=(stop - start, tensor.shape[1]),
    )
