"""What a layer of the engine holds, read from the checkpoint's stored bytes: the other side of the numerics probe.

    references = References("mini_kimi_nvfp4", model, format="mxfp4")
    references.linear("model.layers.0.mlp.gate_up_proj", layer, columns)   # [Part(gate_proj), Part(up_proj)]
    references.expert("model.layers.1.mlp.experts", layer, 3, columns)     # ExpertParts of this rank's expert 3

Engine modules are found by the model class's own maps (renamed prefixes, fused modules); the rows and columns of this
rank by the sizes of both sides. Codes are decoded by `workbench.checkpoints`, in float32; with `format`, what load-time
requantization makes of them is a second candidate. Where a module has no counterpart, CheckpointError says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.open import Entry
from workbench.errors import CheckpointError
from workbench.formats import QuantizedTensor, get_format, quantize

from .numerics_probe import ExpertParts, Part

_FUSED = {  # where a model class publishes no packed_modules_mapping
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
AT_LOAD = " at load"  # after a format's name: what requantization at load makes
_GATE, _UP, _DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
_SLICED = {"nvfp4": 16, "mxfp4": 32}  # formats cut by columns before decoding: elements a block


class References:
    """An open checkpoint beside a loaded model. format, rule: of requantization at load, "" for none."""

    def __init__(self, checkpoint: str | Path, model: nn.Module, *, format: str = "", rule: str = "") -> None:
        self._checkpoint = open_checkpoint(checkpoint)
        self._format, self._rule = format, rule or None
        self._fused: dict[str, Sequence[str]] = {**_FUSED, **(getattr(model, "packed_modules_mapping", None) or {})}
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._entries: dict[str, Entry] = {}
        self._experts: dict[str, dict[int, dict[str, Entry]]] = {}
        for entry in self._checkpoint.entries():
            if not entry.projection:
                continue
            name = self._engine_name(entry, mapper)
            self._entries[name] = entry
            if entry.expert >= 0:
                base, _, _ = name.rpartition(f".{entry.expert}.")
                self._experts.setdefault(base, {}).setdefault(entry.expert, {})[entry.projection] = entry

    def close(self) -> None:
        self._checkpoint.close()

    def modules(self, name: str) -> list[str]:
        """The checkpoint's modules that the engine's module `name` holds, in row order; of experts, all of them. Empty
        where there is none."""
        if (experts := self._experts.get(_experts_base(name))) is not None:
            return [entry.module for of in experts.values() for entry in of.values()]
        return [entry.module for entry in self._linear_entries(name)]

    def linear(self, name: str, layer: nn.Module, columns: Sequence[int]) -> list[Part]:
        """The matrices of a linear layer or an output head, this rank's rows, in the probed columns of this rank.

        Raises CheckpointError when the checkpoint has none for it, or of another shape.
        """
        entries = self._linear_entries(name)
        if not entries:
            raise CheckpointError("the checkpoint has no tensor for it")
        widths = list(getattr(layer, "output_partition_sizes", ()) or [e.shape[0] for e in entries])
        ranks, rank = int(getattr(layer, "tp_size", 1)), int(getattr(layer, "tp_rank", 0))
        shard = getattr(layer, "shard_indices", None)  # of an output head
        offset = _column_offset(layer, entries[0], ranks, rank)
        cut = [offset + c for c in columns]
        if len(entries) != len(widths) and sum(e.shape[0] for e in entries) == sum(widths):
            widths = [e.shape[0] for e in entries]
        if len(widths) != len(entries):
            raise CheckpointError(f"it has {len(widths)} matrices, the checkpoint {len(entries)}")
        parts = []
        for entry, width in zip(entries, widths, strict=True):
            if shard is not None:
                first = int(shard.org_vocab_start_index)
                width = int(shard.org_vocab_end_index) - first
            else:
                first = _first_row(entry.shape[0], width, ranks, rank)
            parts.append(self._part(entry, slice(first, first + width), cut))
        return parts

    def experts(self, name: str) -> list[int]:
        """Numbers of the experts that the checkpoint has for the engine's module `name`."""
        return sorted(self._experts.get(_experts_base(name), ()))

    def hidden(self, name: str) -> int:
        """The hidden size of the experts of the engine's module `name`."""
        of = next(iter(self._experts[_experts_base(name)].values()))
        gate = next(entry for projection, entry in of.items() if projection in _GATE)
        return gate.shape[1]

    def expert(self, name: str, layer: nn.Module, expert: int, columns: Sequence[int]) -> ExpertParts:
        """One expert's matrices, this rank's share of the intermediate size. Raises CheckpointError as `linear`."""
        layers = self._experts.get(_experts_base(name), {})
        found = layers.get(expert, {})
        gate, up, down = (next((found[p] for p in names if p in found), None) for names in (_GATE, _UP, _DOWN))
        if gate is None or up is None or down is None:
            raise CheckpointError(f"the checkpoint has no gate, up and down projection for expert {expert}")
        ranks = int(layer.moe_config.tp_size)  # type: ignore[union-attr,arg-type]
        inter = gate.shape[0] // ranks
        first = int(layer.moe_config.tp_rank) * inter  # type: ignore[union-attr,arg-type]
        rows = slice(first, first + inter)
        stored = {"gate": self._read(gate), "up": self._read(up), "down": self._read(down)}
        gate_w, up_w = (_candidates(stored[p], rows, list(columns), self._format, self._rule) for p in ("gate", "up"))
        down_w = _candidates(stored["down"], slice(None), list(range(first, first + inter)), self._format, self._rule)
        gate_up = {key: (gate_w[key], up_w[key]) for key in gate_w if key in up_w}
        gate_up |= _shared_globals(stored["gate"], stored["up"], gate_w, up_w)
        scales = {p: _input_scale(t) for p, t in stored.items()}
        return ExpertParts(
            gate_up=gate_up,
            down=down_w,
            gate_up_scale=scales["gate"],
            down_scale=scales["down"],
            gate_up_scale_largest=self._largest(layers, (*_GATE, *_UP)),
            down_scale_largest=self._largest(layers, _DOWN),
            codes=_codes(stored, rows),
        )

    # ---- private

    def _engine_name(self, entry: Entry, mapper: Any) -> str:
        """The checkpoint's module under the engine's prefix. Some maps also name the fused module that it goes into;
        its own name stays then."""
        mapped = mapper.apply_list([entry.name]) if mapper is not None else []
        name: str = mapped[0].removesuffix(".weight") if mapped else entry.module
        parent, _, last = name.rpartition(".")
        fused = last != entry.projection and entry.projection in self._fused.get(last, ())
        return f"{parent}.{entry.projection}" if fused else name

    def _linear_entries(self, name: str) -> list[Entry]:
        if name in self._entries:
            return [self._entries[name]]
        parent, _, last = name.rpartition(".")
        names = [f"{parent}.{part}" if parent else part for part in self._fused.get(last, ())]
        found = [self._entries.get(n) for n in names]
        return [e for e in found if e is not None] if all(found) else []

    def _part(self, entry: Entry, rows: slice, columns: list[int]) -> Part:
        stored = self._read(entry)
        weights = _candidates(stored, rows, columns, self._format, self._rule)
        return Part(module=entry.module, rows=rows.stop - rows.start, weights=weights, input_scale=_input_scale(stored))

    def _read(self, entry: Entry) -> QuantizedTensor | Tensor:
        return self._checkpoint.read(entry.name)

    def _largest(self, layers: dict[int, dict[str, Entry]], projections: Sequence[str]) -> float:
        """The largest input scale that any expert of the layer has for one of the projections; NaN without one."""
        names = [e.name for of in layers.values() for p, e in of.items() if p in projections and e.has_input_scale]
        scales = []
        for name in names:
            parts = self._checkpoint.parts(name)
            scales.append(float(self._checkpoint.folder.load(parts["input_scale"].name).float().max()))
        return max(scales, default=float("nan"))


# ---- private ---------------------------------------------------------------------------------------------------------


def _experts_base(name: str) -> str:
    return name.removesuffix(".routed_experts")


def _codes(stored: dict[str, QuantizedTensor | Tensor], rows: slice) -> tuple[Tensor, Tensor] | None:
    """Codes of gate over up, and of down, of this rank; None where they are no codes, or not cut at whole bytes."""
    gate, up, down = (stored[p] for p in ("gate", "up", "down"))
    if isinstance(gate, Tensor) or isinstance(up, Tensor) or isinstance(down, Tensor):
        return None
    per_byte, rest = divmod(down.shape[1], down.codes.shape[1])
    if rest or rows.start % per_byte or rows.stop % per_byte:
        return None
    columns = slice(rows.start // per_byte, rows.stop // per_byte)
    return torch.cat([gate.codes[rows], up.codes[rows]]), down.codes[:, columns].contiguous()


def _candidates(
    stored: QuantizedTensor | Tensor, rows: slice, columns: list[int], format: str, rule: str | None
) -> dict[str, Tensor]:
    """What a matrix could be in memory, float32, cut to rows and columns: as stored, and requantized to `format`."""
    if isinstance(stored, Tensor):
        plain = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
        found = {plain.get(stored.dtype, str(stored.dtype)): stored[rows][:, columns].float()}
        stored_format = ""
    else:
        found = {stored.format: _decoded(stored, columns)[rows]}
        stored_format = stored.format
    if format and (format != stored_format or rule):
        name = f"{format}{AT_LOAD}"
        if get_format(format).has_global or len(columns) % 32 or not _whole_groups(columns):
            whole = stored.float() if isinstance(stored, Tensor) else stored.effective(torch.float32)
            found[name] = quantize(whole, format, rule).dequantize()[rows][:, columns]
        else:
            dense = stored[:, columns].float() if isinstance(stored, Tensor) else _decoded(stored, columns)
            found[name] = quantize(dense, format, rule).dequantize()[rows]
    return found


def _decoded(stored: QuantizedTensor, columns: list[int]) -> Tensor:
    """Columns of a quantized matrix in float32, input scaling (AWQ) included; only they are decoded where they can."""
    block = _SLICED.get(stored.format)
    if block is None or not _whole_groups(columns) or stored.group_index is not None:
        return stored.effective(torch.float32)[:, columns]
    of_blocks = [c // block for c in columns[::block]]
    global_scale = stored.global_scale
    part = dataclasses.replace(
        stored,
        codes=stored.codes[:, [c // 2 for c in columns[::2]]].contiguous(),
        block_scales=stored.block_scales.view(torch.uint8)[:, of_blocks].contiguous().view(stored.block_scales.dtype),
        global_scale=global_scale,
        shape=(stored.shape[0], len(columns)),
        pre_quant_scale=None if stored.pre_quant_scale is None else stored.pre_quant_scale[columns],
    )
    return part.effective(torch.float32)


def _whole_groups(columns: list[int]) -> bool:
    groups = [columns[i : i + 32] for i in range(0, len(columns), 32)]
    return all(len(g) == 32 and g[0] % 32 == 0 and g[-1] == g[0] + 31 for g in groups)


def _shared_globals(
    gate: Any, up: Any, gate_w: dict[str, Tensor], up_w: dict[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """How a server decodes gate and up that keeps one global scale for both, where the checkpoint has two."""
    if not isinstance(gate, QuantizedTensor) or not isinstance(up, QuantizedTensor):
        return {}
    if gate.format != up.format or gate.global_scale is None or up.global_scale is None:
        return {}
    g, u = float(gate.global_scale.max()), float(up.global_scale.max())
    if g == u:
        return {}
    name, largest = gate.format, max(g, u)
    return {
        f"{name}, both with the gate's global": (gate_w[name], up_w[name] * (g / u)),
        f"{name}, both with the larger global": (gate_w[name] * (largest / g), up_w[name] * (largest / u)),
    }


def _input_scale(stored: QuantizedTensor | Tensor) -> float:
    if isinstance(stored, Tensor) or stored.input_scale is None:
        return float("nan")
    return float(stored.input_scale.float().max())


def _first_row(rows: int, width: int, ranks: int, rank: int) -> int:
    """Where this rank's `width` rows of a matrix of `rows` begin. Heads that several ranks hold show in the sizes."""
    if width >= rows:  # whole, or padded
        return 0
    if rows % width or ranks % (rows // width):
        raise CheckpointError(f"it has {width} of {rows} rows on one of {ranks} ranks: no even share")
    return rank // (ranks // (rows // width)) * width


def _column_offset(layer: nn.Module, entry: Entry, ranks: int, rank: int) -> int:
    whole = entry.shape[1]
    own = int(getattr(layer, "input_size_per_partition", 0) or whole)
    if own >= whole:
        return 0
    if own * ranks != whole:
        raise CheckpointError(f"it has {own} of {whole} columns on one of {ranks} ranks: no even share")
    return rank * own
