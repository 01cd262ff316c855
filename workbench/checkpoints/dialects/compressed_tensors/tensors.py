"""Locating compressed-tensors' weights from headers, and reading one into canonical form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from workbench.errors import CheckpointError
from workbench.formats import QuantizedTensor, get_format
from workbench.formats.table import WHOLE

from ...files import Folder, Problem
from ...header import StoredTensor
from ..base import Load, Located
from ..dense import LOW_BIT_DTYPES, PLAIN_FORMATS, locate_plain
from ..int4 import unpack_int32
from .groups import Block, Plan, Scheme

# suffix -> role. Divisors have roles of their own: read as multipliers they would be wrong by their square.
ROLES = {
    "weight_scale": "block_scales",
    "weight_global_scale": "global_divisor",
    "weight_zero_point": "zero_points",
    "weight_shape": "shape",
    "weight_g_idx": "group_index",
    "input_scale": "input_scale",
    "input_global_scale": "input_divisor",
    "input_zero_point": "input_zero_point",
}
SCALARS = ("global_divisor", "input_divisor", "input_scale")
E8M0 = ("U8", "F8_E8M0")
FLOATS = ("BF16", "F16", "F32")
WORD_BITS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What `assemble_tensor` cannot see in the parts. block: see `QuantizedTensor`. bits: of a code in I32 words, else
    0."""

    block: Block | None = None
    bits: int = 0


def locate_tensors(folder: Folder, plan: Plan | None, problems: list[Problem]) -> list[Located]:
    """Every canonical tensor; the tensors decide its format, the plan the block where the shapes leave it open.

    A packed or low-bit tensor without its scales, with scales of another shape, or with scales that no format has, goes
    to `problems`; so does a scheme that contradicts the tensor (a warning).
    """
    finder = _Finder(folder, plan, problems)
    located = []
    for name, info in folder.tensors.items():
        stem, suffix = _split(name)
        if suffix == "weight_packed" or (suffix == "weight" and finder.is_quantized(info, stem)):
            found = finder.locate_weight(info, stem)
        elif suffix in ROLES:
            finder.check_companion(info, stem)
            continue
        else:
            found = locate_plain(info, problems)
        if found is not None:
            located.append(found)
    finder.report_conflicts()
    return located


def assemble_tensor(located: Located, load: Load) -> QuantizedTensor | torch.Tensor:
    """The canonical tensor. Raises CheckpointError where a small part (weight_shape, weight_g_idx) contradicts it."""
    parts, layout = located.parts, located.detail
    if not located.quantized:
        return load(parts["values"])
    spec = get_format(located.format)
    _check_shape(located, load)
    scale_shape = spec.scale_shape(located.shape, layout.block)
    scales = load(parts["block_scales"]).reshape(scale_shape)
    if spec.scale != "e4m3":
        scales = scales.view(torch.uint8) if scales.element_size() == 1 else scales.float()
    return QuantizedTensor(
        format=located.format,
        codes=_read_codes(load(parts["values"]), layout.bits, located.shape[1]),
        block_scales=scales,
        global_scale=_reciprocal(load(parts["global_divisor"])) if "global_divisor" in parts else None,
        shape=located.shape,
        block=layout.block,
        zero_points=_read_zero_points(located, load).reshape(scale_shape) if "zero_points" in parts else None,
        group_index=_read_group_index(located, load, scale_shape[-1]) if "group_index" in parts else None,
        input_scale=_read_input_scale(located, load),
    )


_EXPORT = "export the checkpoint again; without its scales a weight cannot be decoded"


class _Finder:
    """One pass over a folder's headers."""

    def __init__(self, folder: Folder, plan: Plan | None, problems: list[Problem]) -> None:
        self.folder, self.tensors = folder, folder.tensors
        self.plan, self.problems = plan, problems
        self.conflicts: dict[str, list[StoredTensor]] = {}

    def fault(self, check: str, message: str, fix: str, info: StoredTensor) -> None:
        self.problems.append(Problem(check, "error", message, tensor=info.name, file=info.file, fix=fix))

    def is_quantized(self, info: StoredTensor, stem: str) -> bool:
        return info.dtype in LOW_BIT_DTYPES or stem + "weight_scale" in self.tensors

    def check_companion(self, info: StoredTensor, stem: str) -> None:
        weight = self.tensors.get(stem + "weight")
        if stem + "weight_packed" not in self.tensors and (weight is None or not self.is_quantized(weight, stem)):
            message = f"{info.name} ({_shown(info)} in {info.file}) belongs to no quantized weight"
            fix = "its weight is missing or unquantized; export the checkpoint again"
            self.fault("missing-companion", message, fix, info)

    def locate_weight(self, info: StoredTensor, stem: str) -> Located | None:
        """The located matrix of `weight_packed` or a low-bit `weight`, None after a fault."""
        roles = {role: stem + suffix for suffix, role in ROLES.items() if stem + suffix in self.tensors}
        parts = {role: self.tensors[name] for role, name in roles.items()}
        if not self._check_parts(info, stem, parts):
            return None
        scheme = self.plan.scheme_of(stem.removesuffix(".")) if self.plan is not None else None
        found = self._format_of(info, parts, scheme)
        if found is None:
            return None
        format, k, layout = found
        n = info.shape[0]
        if not self._check_zero_points(info, parts, format, (n, k), layout):
            return None
        if scheme is not None and (format, layout.block) != (scheme.format, scheme.block):
            declared, stored = _told(scheme.format, scheme.block), _told(format, layout.block)
            self.conflicts.setdefault(f"the config says {declared}, the tensors are {stored}", []).append(info)
        if "input_zero_point" in roles:  # activations that are not symmetric have no canonical scale
            roles.pop("input_scale", None)
        return Located(
            name=stem + "weight",
            format=format,
            shape=(n, k),
            parts={"values": info.name, **roles},
            quantized=True,
            detail=layout,
        )

    def report_conflicts(self) -> None:
        for message, infos in self.conflicts.items():
            self.problems.append(
                Problem(
                    "config-conflict",
                    "warning",
                    message + (f" ({len(infos)} tensors)" if len(infos) > 1 else ""),
                    tensor=infos[0].name,
                    file=infos[0].file,
                    fix="the tensors decide what is read here; make the config say what they are",
                )
            )

    def _check_parts(self, info: StoredTensor, stem: str, parts: Mapping[str, StoredTensor]) -> bool:
        if stem + "weight_packed" in self.tensors and stem + "weight" in self.tensors:
            message = f"{stem}weight and {stem}weight_packed are both stored; which of them is meant cannot be told"
            self.fault("missing-companion", message, "remove the one that is left over", info)
        elif info.dtype in PLAIN_FORMATS:
            message = f"{info.name} is {info.dtype} with a weight_scale beside it: calibrated, but not compressed"
            self.fault("scale-shape", message, "save the model compressed (save_compressed=True)", info)
        elif "block_scales" not in parts:
            message = f"{info.name} is {_shown(info)} in {info.file}, but {stem}weight_scale is in no shard"
            self.fault("missing-companion", message, _EXPORT, info)
        elif len(info.shape) != 2:
            message = f"{info.name} is {_shown(info)}, expected a matrix"
            self.fault("scale-shape", message, "split a stack of experts into one module an expert", info)
        else:
            for role in SCALARS:
                part = parts.get(role)
                if part is not None and (part.dtype not in PLAIN_FORMATS or part.shape not in ((), (1,))):
                    message = f"{part.name} in {part.file} is {_shown(part)}, expected one F32 value, [1] or []"
                    self.fault("scale-shape", message, "export the checkpoint again", part)
                    return False
            shape, index = parts.get("shape"), parts.get("group_index")
            for part, wanted in ((shape, ("I64", "I32")), (index, ("I32", "I64"))):
                if part is not None and (part.dtype not in wanted or (part is shape and part.shape != (2,))):
                    message = f"{part.name} in {part.file} is {_shown(part)}, expected {wanted[0]}"
                    self.fault("scale-shape", message, "export the checkpoint again", part)
                    return False
            return True
        return False

    def _format_of(
        self, info: StoredTensor, parts: Mapping[str, StoredTensor], scheme: Scheme | None
    ) -> tuple[str, int, Layout] | None:
        """Canonical format, K and layout from dtypes and shapes; None after a fault."""
        scale = parts["block_scales"]
        packed = info.name.endswith("weight_packed")
        found: tuple[str, int, Layout] | None = None
        if packed and info.dtype == "U8":
            found = _packed_floats(info, scale)
        elif packed and info.dtype == "I32" and scale.dtype in FLOATS:
            found = self._packed_integers(info, scale, parts, scheme)
        elif not packed and info.dtype in ("F8_E4M3", "I8"):
            k = info.shape[1]
            kind = "int8" if info.dtype == "I8" else "mxfp8_e4m3" if scale.dtype in E8M0 else "fp8"
            if kind == "mxfp8_e4m3":
                found = (kind, k, Layout(block=(1, 32))) if _grid(scale) == (info.shape[0], -(-k // 32)) else None
            elif scale.dtype in FLOATS:
                chosen = _choose_block(info, scale, k, kind, scheme)
                found = (chosen[0], k, Layout(block=chosen[1])) if chosen is not None else None
        has_divisor = "global_divisor" in parts
        if found is not None and get_format(found[0]).has_global != has_divisor:
            has = "has" if has_divisor else "lacks"
            message = f"{info.name} is {found[0]} by its scales and {has} a weight_global_scale"
            self.fault("missing-companion", message, "find out which format it is; export the checkpoint again", info)
            return None
        if found is None:
            said = _told(scheme.format, scheme.block) if scheme is not None else "nothing"
            message = (
                f"{scale.name} in {scale.file} is {_shown(scale)} beside {info.name} {_shown(info)}: no format has such"
                f" scales (the config says {said})"
            )
            self.fault(
                "scale-shape",
                message,
                "export the checkpoint again; or restore the config's group or block size",
                scale,
            )
        return found

    def _packed_integers(
        self, info: StoredTensor, scale: StoredTensor, parts: Mapping[str, StoredTensor], scheme: Scheme | None
    ) -> tuple[str, int, Layout] | None:
        declared = 8 if scheme is not None and scheme.format.startswith("int8") else 4
        for bits in (declared, 12 - declared):
            k = info.shape[1] * WORD_BITS // bits
            if "shape" in parts and not _fills_words(k, scale, scheme):
                # The last word may be padded, and only weight_shape says how far.
                n, stored_k = self.folder.load(parts["shape"].name).tolist()
                if n != info.shape[0] or not k - WORD_BITS // bits < stored_k <= k:
                    continue
                k = stored_k
            chosen = _choose_block(info, scale, k, f"int{bits}", scheme)
            if chosen is not None and (k * bits) % 8 == 0:
                return chosen[0], k, Layout(block=chosen[1], bits=bits)
        return None

    def _check_zero_points(
        self,
        info: StoredTensor,
        parts: Mapping[str, StoredTensor],
        format: str,
        shape: tuple[int, int],
        layout: Layout,
    ) -> bool:
        part = parts.get("zero_points")
        if part is None:
            return True
        spec = get_format(format)
        rows, columns = spec.scale_shape(shape, layout.block)
        packed = layout.bits and rows == shape[0]
        expected = (-(-rows * layout.bits // WORD_BITS), columns) if packed else (rows, columns)
        fits = _grid(part) == expected and part.dtype == ("I32" if packed else "I8")
        if not spec.zero_points or not fits:
            message = f"{part.name} in {part.file} is {_shown(part)}; {_told(format, layout.block)} has " + (
                f"{'I32' if packed else 'I8'} {list(expected)}" if spec.zero_points else "no zero points"
            )
            self.fault("scale-shape", message, "export the checkpoint again", part)
            return False
        return True


def _packed_floats(info: StoredTensor, scale: StoredTensor) -> tuple[str, int, Layout] | None:
    """FP4 or FP6 of packed bytes: the scales' dtype and count tell which."""
    formats = ("nvfp4",) if scale.dtype == "F8_E4M3" else ("mxfp4", "mxfp6_e2m3") if scale.dtype in E8M0 else ()
    n, columns = info.shape
    for format in formats:
        k = columns * 4 // 3 if format == "mxfp6_e2m3" else columns * 2
        block = get_format(format).block
        if k % block == 0 and _grid(scale) == (n, k // block):
            return format, k, Layout()
    return None


def _choose_block(
    info: StoredTensor, scale: StoredTensor, k: int, kind: str, scheme: Scheme | None
) -> tuple[str, Block | None] | None:
    """Format of `kind` ("fp8", "int8", "int4") and block that the float scales fit: the config's if they fit it, else
    what the shape alone says. A grid of blocks needs the config: its size cannot be told from partial blocks."""
    shape, grid = (info.shape[0], k), _grid(scale)
    if scheme is not None and scheme.format.startswith(kind) and _fits(scheme, shape, grid):
        return scheme.format, scheme.block
    if grid == (1, 1):
        return (f"{kind}_tensor", None) if kind != "int4" else ("int4_group", (WHOLE, WHOLE))
    if grid == (shape[0], 1):
        return (f"{kind}_channel", None) if kind != "int4" else ("int4_group", (1, WHOLE))
    if grid[0] == shape[0] and grid[1] and k % grid[1] == 0:
        return ("fp8_block" if kind == "fp8" else f"{kind}_group"), (1, k // grid[1])
    return None


def _fills_words(k: int, scale: StoredTensor, scheme: Scheme | None) -> bool:
    """Whether the last word is full, K columns: the groups are whole words, and there are as many as scales."""
    group = scheme.block[1] if scheme is not None and scheme.block is not None else 0
    return group > 0 and group % 8 == 0 and k == group * _grid(scale)[1]


def _fits(scheme: Scheme, shape: tuple[int, int], grid: tuple[int, int]) -> bool:
    return get_format(scheme.format).scale_shape(shape, scheme.block) == grid


def _grid(scale: StoredTensor) -> tuple[int, int]:
    """Rows and columns of scales; `[]` and `[1]` are one, `[N]` is a column."""
    if len(scale.shape) == 2:
        return scale.shape[0], scale.shape[1]
    return (scale.shape[0] if len(scale.shape) == 1 else 1), (1 if len(scale.shape) < 2 else -1)


def _split(name: str) -> tuple[str, str]:
    """A tensor's name with its last dot, and what follows: ("model.layers.0.mlp.up_proj.", "weight_packed")."""
    stem, dot, suffix = name.rpartition(".")
    return stem + dot, suffix


def _shown(info: StoredTensor) -> str:
    return f"{info.dtype} {list(info.shape)}"


def _told(format: str, block: Block | None) -> str:
    if block is None:
        return format
    rows, columns = ("all" if size == WHOLE else size for size in block)
    return f"{format} (a scale for {rows} rows by {columns} columns)"


def _check_shape(located: Located, load: Load) -> None:
    if "shape" in located.parts:
        stored = load(located.parts["shape"]).flatten().tolist()
        if tuple(stored) != located.shape:
            raise CheckpointError(
                f"{located.parts['shape']} says {stored}, the packed words and the scales of {located.name} say"
                f" {list(located.shape)}",
                fix="export the checkpoint again",
            )


def _read_codes(stored: torch.Tensor, bits: int, k: int) -> torch.Tensor:
    """Canonical codes. I32 words are little-endian bytes of offset-binary codes, the lowest bits first."""
    if bits == 0:
        return stored
    codes = stored.view(torch.uint8)[:, : k * bits // 8]
    return codes ^ 0x88 if bits == 4 else (codes ^ 0x80).view(torch.int8)


def _read_zero_points(located: Located, load: Load) -> torch.Tensor:
    """int32 zero points; those of packed weights are packed along the rows, and offset as the codes are."""
    stored, bits = load(located.parts["zero_points"]), located.detail.bits
    if stored.dtype != torch.int32:
        return stored.int()
    codes = unpack_int32(stored.T.contiguous(), bits).T[: located.shape[0]]
    return codes.int() - (1 << (bits - 1))


def _read_group_index(located: Located, load: Load, groups: int) -> torch.Tensor | None:
    """int32 `[K]`; None where it was never set (-1). Raises CheckpointError for groups that are not equally large."""
    name, k = located.parts["group_index"], located.shape[1]
    index = load(name)
    if bool((index < 0).any()):
        return None
    fits = index.shape == (k,) and bool((index < groups).all())
    if not fits or len(set(torch.bincount(index.long(), minlength=groups).tolist())) > 1:
        raise CheckpointError(
            f"{name} does not give each of {groups} groups an equal share of the {k} columns of {located.name}",
            fix="export the checkpoint again",
        )
    return index.int()


def _reciprocal(divisor: torch.Tensor) -> torch.Tensor:
    """The divisor as a decode multiplier: float64, so that its product with a scale rounds as the division does."""
    return 1.0 / divisor.double().reshape(())


def _read_input_scale(located: Located, load: Load) -> torch.Tensor | None:
    """Decode multiplier; 0 where a dead module's divisor is 0, which is no infinite scale but a missing one."""
    parts = located.parts
    if "input_divisor" in parts:
        divisor = load(parts["input_divisor"])
        return torch.zeros((), dtype=torch.float64) if bool(divisor == 0) else _reciprocal(divisor)
    return load(parts["input_scale"]).float().reshape(()) if "input_scale" in parts else None
