"""Fused expert stacks: one stored tensor for all experts of a layer, handed out matrix by matrix.

    entries = split_expert_stacks(folder, entries, problems)    # one experts.<e>.gate_proj.weight and so on an expert
    w_nk = read_plain(entry, folder.load)                       # reads that expert's part of the stack, no more

A stack is `[E, N, K]` (transformers 5: Qwen3.5, GLM, ...) or, transposed, `[E, K, N]` (Llama-4, gpt-oss). Gate and up
lie one after the other along N, or interleaved (gpt-oss: gate 0::2, up 1::2). The shape and `hidden_size` tell the
orientation; the order of gate and up is the family's (`model_type`). What neither tells is refused. Gate and up of one
expert are read apart, so a stack is read twice: the price for never holding more than one expert.
Source: the experts' modules and weight conversions of transformers 5.19; vLLM 0.32 for Step-3.5's names.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..files import Folder, Problem
from .base import Load, Located


@dataclass(frozen=True, slots=True)
class StackLayout:
    """transposed: `[E, K, N]` instead of `[E, N, K]`. interleaved: gate and up alternate along N."""

    transposed: bool
    interleaved: bool


# Families that do not write `[E, 2I, H]` with gate before up.
LAYOUTS = {
    "gpt_oss": StackLayout(transposed=True, interleaved=True),
    "llama4": StackLayout(transposed=True, interleaved=False),
    "llama4_text": StackLayout(transposed=True, interleaved=False),
    "qwen3_vl_moe": StackLayout(transposed=True, interleaved=False),
    "qwen3_vl_moe_text": StackLayout(transposed=True, interleaved=False),
    "aria": StackLayout(transposed=True, interleaved=False),
    "aria_text": StackLayout(transposed=True, interleaved=False),
}
STRAIGHT = StackLayout(transposed=False, interleaved=False)

# Stored name -> container and projection. Step-3.5 and GraniteMoe have no `experts` module of their own.
_NAMES = (
    re.compile(
        r"(?P<container>(?:.*\.)?experts)\.(?P<projection>gate_up_proj|gate_proj|up_proj|down_proj|fc1|fc2)"
        r"(?:\.weight|(?P<bias>[._]bias))?"
    ),
    re.compile(r"(?P<parent>.*\.moe)\.(?P<projection>gate_proj|up_proj|down_proj)\.weight"),
    re.compile(r"(?P<parent>.*\.block_sparse_moe)\.(?P<projection>input_linear|output_linear)\.weight"),
)
_PROJECTIONS = {
    "fc1": "gate_up_proj",
    "fc2": "down_proj",
    "input_linear": "gate_up_proj",
    "output_linear": "down_proj",
}
INNER_CONFIGS = ("text_config", "llm_config", "language_config")
_FIX = (
    "give hidden_size and model_type in config.json as the model has them, or split the stack into"
    " experts.<e>.{gate_proj,up_proj,down_proj}.weight"
)


@dataclass(frozen=True, slots=True)
class ExpertSlice:
    """Where one expert's matrix (or bias) lies in its stack. outputs: its rows, or columns of a transposed stack."""

    expert: int
    outputs: slice
    transposed: bool = False

    def read(self, load: Load, name: str) -> torch.Tensor:
        """This part of the stored stack `name`, `[N, K]` (a bias: `[N]`), in memory of its own."""
        return self.cut(load(name, rows=(self.expert, self.expert + 1))[0])

    def cut(self, part: torch.Tensor) -> torch.Tensor:
        """This part of one expert's share of the stack."""
        part = part.T if self.transposed else part
        part = part if self.outputs == slice(None) else part[self.outputs]
        return part.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True)
class Stack:
    """A stored stack. shape: as stored, but 4-bit elements counted: `[E, N, K]`, `[E, K, N]`, or `[E, N]` for a bias.
    container: `....experts`."""

    name: str
    container: str
    projection: str
    parameter: str
    shape: tuple[int, ...]
    layout: StackLayout = STRAIGHT

    def members(self) -> Iterator[tuple[str, tuple[int, ...], ExpertSlice]]:
        """Canonical name, shape and place of every matrix, expert by expert."""
        experts, *dims = self.shape
        transposed = self.layout.transposed and len(dims) == 2
        n, *k = reversed(dims) if transposed else dims
        for expert in range(experts):
            for projection, outputs in self.outputs(n):
                rows = len(range(n)[outputs])
                name = f"{self.container}.{expert}.{projection}.{self.parameter}"
                yield name, (rows, *k), ExpertSlice(expert, outputs, transposed)

    def outputs(self, n: int) -> tuple[tuple[str, slice], ...]:
        """The projections in this stack and where they lie along its `n` outputs (rows, or rows of scales)."""
        if self.projection != "gate_up_proj":
            return ((self.projection, slice(None)),)
        if self.layout.interleaved:
            return (("gate_proj", slice(0, None, 2)), ("up_proj", slice(1, None, 2)))
        return (("gate_proj", slice(0, n // 2)), ("up_proj", slice(n // 2, None)))


def split_expert_stacks(
    folder: Folder, located: Iterable[Located], problems: list[Problem], *, family: StackLayout | None = None
) -> list[Located]:
    """Replace every plain expert stack among `located` by its experts' matrices and biases, read by `read_plain`.

    family: the layout of the dialect's only model family; None: by config.json's model_type. A stack that cannot be
    understood is left out and becomes a problem.
    """
    entries = list(located)
    plain = [entry.name for entry in entries if not entry.quantized]
    stacks = find_stacks(folder, plain, problems, family=family)
    result: list[Located] = []
    for entry in entries:
        if entry.quantized or entry.name not in stacks:
            result.append(entry)
            continue
        stack = stacks[entry.name]
        if stack is not None:
            result += (
                Located(name=name, format=entry.format, shape=shape, parts=entry.parts, detail=place)
                for name, shape, place in stack.members()
            )
    return result


def read_plain(located: Located, load: Load) -> torch.Tensor:
    """The values of an unquantized entry: a stored tensor, or one expert's part of a stack."""
    name = located.parts["values"]
    return located.detail.read(load, name) if isinstance(located.detail, ExpertSlice) else load(name)


def find_stacks(
    folder: Folder, names: Iterable[str], problems: list[Problem], *, family: StackLayout | None = None
) -> dict[str, Stack | None]:
    """The expert stacks among the stored tensors `names`, with their layouts; None where the layout is a problem.

    Raises nothing: shapes that contradict each other or config.json, and names that experts stored one by one have
    already, go to `problems`.
    """
    containers: dict[str, list[Stack]] = {}
    for name in names:
        info = folder.tensors[name]
        packed = info.dtype in ("U8", "I8") and len(info.shape) == 3
        stack = _parse(name, (*info.shape[:2], 2 * info.shape[2]) if packed else info.shape)
        if stack is not None:
            containers.setdefault(stack.container, []).append(stack)
    found: dict[str, Stack | None] = {}
    for stacks in containers.values():
        layout = _choose_layout(stacks, folder.config, family)
        for stack in stacks:
            if isinstance(layout, str):
                settled, reason, file = stack, layout, "config.json"
            else:
                settled = dataclasses.replace(stack, layout=layout)
                reason, file = _check_members(settled, folder), ""
            if reason:
                problems.append(
                    Problem(
                        "config-conflict",
                        "error",
                        f"{stack.name} is an expert stack {list(stack.shape)}: {reason}",
                        tensor=stack.name,
                        file=file or folder.tensors[stack.name].file,
                        fix=_FIX,
                    )
                )
            found[stack.name] = None if reason else settled
    return found


def language_configs(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Where a model's sizes stand: its language model's own config, if there is one, then the whole."""
    return [*(config[key] for key in INNER_CONFIGS if isinstance(config.get(key), dict)), config]


def _parse(name: str, shape: tuple[int, ...]) -> Stack | None:
    for pattern in _NAMES:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        groups = match.groupdict()
        bias = bool(groups.get("bias"))
        if len(shape) != (2 if bias else 3) or 0 in shape:
            return None
        projection = groups["projection"]
        return Stack(
            name=name,
            container=groups.get("container") or groups["parent"] + ".experts",
            projection=_PROJECTIONS.get(projection, projection),
            parameter="bias" if bias else "weight",
            shape=shape,
        )
    return None


def _choose_layout(stacks: list[Stack], config: dict[str, Any], family: StackLayout | None) -> StackLayout | str:
    """The layout of one layer's stacks, or why it is unknown."""
    configs = language_configs(config)
    types = [c["model_type"] for c in configs if c.get("model_type") is not None]
    sizes = [c["hidden_size"] for c in configs if c.get("hidden_size") is not None]
    if family is None:
        family = next((LAYOUTS[t] for t in types if isinstance(t, str) and t in LAYOUTS), None)
    hidden = next((s for s in sizes if type(s) is int and s > 0), 0)
    weights = [s for s in stacks if s.parameter == "weight"]
    votes = set()
    for stack in weights:
        # The axis that holds the hidden size: K for gate and up, N for down.
        straight, turned = (stack.shape[1], stack.shape[2])[:: 1 if stack.projection == "down_proj" else -1]
        if hidden and hidden not in (straight, turned):
            return f"neither dimension is the hidden_size {hidden} of config.json"
        if hidden and straight != turned:
            votes.add(turned == hidden)
    if len(votes) > 1:
        return "its layer's stacks contradict each other: by hidden_size one is [E, N, K], another [E, K, N]"
    if not votes and weights and family is None:
        if hidden:
            return (
                f"both dimensions are the hidden_size {hidden} of config.json, so that [E, N, K] and [E, K, N] cannot"
                f" be told apart, and {_said('model_type', types)}"
            )
        return _said("hidden_size", sizes)
    family_or_default = family or STRAIGHT
    transposed = votes.pop() if votes else family_or_default.transposed
    if transposed and family is None and any(s.projection == "gate_up_proj" for s in stacks):
        return f"it is transposed [E, K, N], and the order of gate and up is not known: {_said('model_type', types)}"
    layout = StackLayout(transposed=transposed, interleaved=family_or_default.interleaved)
    if not _fit_each_other(weights, layout):
        order, key = "[E, K, N]" if transposed else "[E, N, K]", "hidden_size" if hidden else "model_type"
        return f"its layer's stacks do not fit each other as {order}, which config.json's {key} says"
    return layout


def _said(key: str, values: list[Any]) -> str:
    """What config.json says under a key that does not help."""
    if not values:
        return f"config.json has no {key}"
    expected = ", no whole number above 0" if key == "hidden_size" else ", of which no layout is known"
    return f"config.json's {key} is {repr(values[0])[:80]}{expected}"


def _fit_each_other(weights: list[Stack], layout: StackLayout) -> bool:
    """Whether gate and up have the K that is down's N, and the reverse."""
    hidden, inner = set(), set()
    for stack in weights:
        n, k = stack.shape[:0:-1] if layout.transposed else stack.shape[1:]
        if stack.projection == "down_proj":
            n, k = k, n
        hidden.add(k)
        inner.add(n // 2 if stack.projection == "gate_up_proj" else n)
    return len(hidden) <= 1 and len(inner) <= 1


def _check_members(stack: Stack, folder: Folder) -> str:
    """Why this stack cannot be split, "" if it can."""
    n = stack.shape[2] if stack.layout.transposed and stack.parameter == "weight" else stack.shape[1]
    if stack.projection == "gate_up_proj" and n % 2:
        return f"gate and up cannot share its {n} outputs evenly"
    twin = next((name for name, _, _ in stack.members() if name in folder.tensors), "")
    return f"{twin} is stored too, so that expert would be there twice" if twin else ""
