"""What a layer computes, found by asking it: two small matrix products and a comparison with candidates.

    facts = probe_linear(run, k=7168, dtype=torch.bfloat16, device=device, parts=parts)
    facts.weights, facts.match        # "nvfp4", "exact": which stored matrix it multiplies with, and how closely
    facts.activation, facts.scale     # "none", "": what became of the input

One-hot inputs make single columns of the weight come out, with nothing added to them: they are compared bit for bit
with the reference decode of what the checkpoint stores, whatever way the layer keeps it. Rows of seeded values in the
same columns are then predicted from the columns that came out, once for every way of rounding an input; the way that
fits is what runs. A layer is asked twice, with few rows and with many, since kernels change with the batch.

Experts are not linear. One expert at a time is chosen by the routing, and its output compared with a model of it
(gate, up, SiLU, down) under every combination of stored matrices and input rounding: a fit within tolerance, not bits.
Their hidden values are rounded once more, and a last bit on the way there can move one over a boundary of the format,
or a whole block's scale: a row in which that happened tells nothing, so the fit is of the best six rows of eight.

Trade-off: 32 or 64 columns of a matrix are looked at, not all of it, and inputs are rounded by the reference kernels,
from which a fast one may differ in a tie; hence the tolerances below.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.kernels import mx, reference, scaled
from workbench.kernels.tables import E2M1_MAX, E4M3_MAX, MXFP4_BLOCK, NVFP4_BLOCK

ROWS = 8  # of seeded values; fewer than any kernel's small-batch limit
LINEAR_FIT = 0.02  # relative error of a prediction that fits: 2**-8 of a bfloat16 output, and ties rounded otherwise
EXPERT_FIT = 0.08  # the hidden values pass the same rounding again, and some fall on its other side
EXPERT_ROWS = 6  # of ROWS, the best: where more than a quarter does not fit, the expert does not
CLEAR = 1.5  # a fit is clear when the next one is this much worse
EXACT = 1e-6  # and by no less than this: a float32 engine's products fit to the order of their sums, or fully
MATCHES = ("exact", "fits", "rounded", "", "not", "scaled", "differs")  # from best to worst, by first word
_GROUP = 32  # columns looked at together: the largest block of a format that is rounded by block
_ONE_HOT = 1.0

Run = Callable[[Tensor], Tensor]  # input rows [M, K] -> output rows [M, N]
RunExpert = Callable[[Tensor, int], Tensor]  # input rows [M, K], an expert -> output rows [M, K]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One matrix of a layer, as this rank has it. weights: what it could be, name -> float32 `[rows, columns]` in the
    probed columns. input_scale: the checkpoint's, NaN where it has none."""

    module: str
    rows: int
    weights: Mapping[str, Tensor]
    input_scale: float = float("nan")


@dataclass(frozen=True, kw_only=True)
class ExpertParts:
    """One expert's matrices. gate_up: name -> float32 (gate, up) `[I, columns]` each; down: name -> `[H, I]`. Scales:
    the checkpoint's for the inputs, this expert's own and the largest of any expert. codes: as stored, of gate over up
    and of down; None where they are no codes."""

    gate_up: Mapping[str, tuple[Tensor, Tensor]]
    down: Mapping[str, Tensor]
    gate_up_scale: float = float("nan")
    down_scale: float = float("nan")
    gate_up_scale_largest: float = float("nan")
    down_scale_largest: float = float("nan")
    codes: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a probe found.

    weights: the candidate that fits best ("" when there was none to compare with). match: "exact" (every bit of the
    probed columns), "rounded" (within one step of the output's dtype), "scaled by R" (the same but for one factor),
    "fits" (experts: the output's error is within tolerance), or "differs". weight_error: relative, of the columns (of
    the output for experts). activation: "none", a format, or "unclear". scale: how its scale was found; several where
    the probe could not tell them apart, joined by " or ". residual: relative error of the best prediction.
    differing: what the two batch sizes, or the matrices of the layer, do not agree on ("" = they agree). closest: of an
    expert whose activation is unclear though its output fits, the format that fits best; "" otherwise.
    """

    weights: str = ""
    match: str = ""
    weight_error: float = float("nan")
    activation: str = ""
    scale: str = ""
    residual: float = float("nan")
    differing: str = ""
    closest: str = ""


@dataclass(frozen=True)
class Rounding:
    """A way of rounding an input. family: "none" or a format; scale: how its scale is found; block: what K must be a
    multiple of."""

    family: str
    scale: str
    apply: Callable[[Tensor], Tensor] = field(compare=False)
    block: int = 1


@dataclass(frozen=True, kw_only=True)
class _Choice:
    family: str
    scales: tuple[str, ...]
    residual: float
    tried: _Try


def probe_columns(k: int) -> list[int]:
    """The columns looked at: the first 32, and the last whole group of 32 where K has another."""
    first = list(range(min(_GROUP, k)))
    last = (k - _GROUP) // _GROUP * _GROUP
    return first + (list(range(last, last + _GROUP)) if last >= _GROUP else [])


def probe_inputs(k: int, columns: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One-hot rows `[columns, K]` and rows of seeded values `[ROWS, K]`, zero outside the columns, both float32 and
    exact in `dtype`. Magnitudes spread over five powers of two, and rows over eight, so that scales of a token, a
    block, a tensor and a checkpoint differ."""
    one_hot = torch.zeros(len(columns), k)
    one_hot[torch.arange(len(columns)), torch.tensor(columns)] = _ONE_HOT
    generator = torch.Generator().manual_seed(zlib.crc32(b"numerics probe"))
    shape = (ROWS, len(columns))
    magnitude = torch.exp2(-5.0 * torch.rand(shape, generator=generator))
    sign = torch.randint(0, 2, shape, generator=generator) * 2.0 - 1.0
    rows = torch.exp2(torch.linspace(-3.1, 4.9, ROWS)).unsqueeze(1)
    values = torch.zeros(ROWS, k)
    values[:, columns] = (magnitude * sign * rows).to(dtype).float()
    return one_hot, values


def probe_linear(
    run: Run,
    *,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    parts: Sequence[Part],
) -> Facts:
    """Ask a linear layer. run: its product without a bias, on rows of `dtype` on `device`. parts: its matrices in row
    order, as far as the checkpoint has them; without any, only the input's rounding is told.

    What `run` raises is passed on. Rows beyond the parts' (padding) are left out.
    """
    columns = probe_columns(k)
    one_hot, values = probe_inputs(k, columns, dtype)
    together = torch.cat([one_hot, values])
    usual = _usual_tries(k, dtype)
    small = run(values.to(device, dtype)).float().cpu()
    large = run(together.to(device, dtype)).float().cpu()
    parts = parts or [Part(module="", rows=large.shape[-1], weights={})]
    found, start = [], 0
    for part in parts:
        rows = slice(start, start + part.rows)
        start += part.rows
        static = static_roundings(_own_scales(part.input_scale, [p.input_scale for p in parts]), k)
        tries = [*usual, *(_Try(r, together, values, columns) for r in static)]
        found.append(_probe_part(part, tries, small[:, rows], large[:, rows], dtype))
    return merge_facts(found, [part.module.rpartition(".")[2] for part in parts])


def probe_expert(
    run: RunExpert,
    expert: int,
    *,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    parts: ExpertParts,
    any_factor: bool = False,
) -> Facts:
    """Ask one gated SiLU expert. run: the experts' output for rows that all go to `expert` with weight 1.

    any_factor: the output may come multiplied by the router's own scaling, which is fitted and not told.
    """
    columns = probe_columns(k)
    _, values = probe_inputs(k, columns, dtype)
    y = run(values.to(device, dtype), expert).float().cpu()
    fits: list[tuple[float, str, Rounding]] = []
    inter = next(iter(parts.down.values())).shape[-1]
    first = usual_roundings(k) + static_roundings(_expert_scales(parts.gate_up_scale, parts.gate_up_scale_largest), k)
    second = usual_roundings(inter)
    second += static_roundings(_expert_scales(parts.down_scale, parts.down_scale_largest), inter)
    of_hidden = {(r.family, r.scale): r for r in second}
    for name, (gate, up) in parts.gate_up.items():
        for rounding in first:
            then = of_hidden.get((rounding.family, rounding.scale), of_hidden.get((rounding.family, "static")))
            if then is None:
                continue
            x = rounding.apply(values)[:, columns]
            gate_y, up_y = ((x @ w.T).to(dtype) for w in (gate, up))
            hidden = (torch.nn.functional.silu(gate_y.float()).to(dtype) * up_y).float()
            down = parts.down.get(name, next(iter(parts.down.values())))
            fits.append((_expert_misfit(y, then.apply(hidden) @ down.T, any_factor=any_factor), name, rounding))
    fits.sort(key=lambda fit: fit[0])
    residual, name, rounding = fits[0]
    enough = max(CLEAR * residual, EXACT)
    same = [r for error, n, r in fits if n == name and r.family == rounding.family and error < enough]
    other = next((error for error, n, r in fits if (n, r.family) != (name, rounding.family)), float("inf"))
    clear = residual <= EXPERT_FIT and other >= enough
    return Facts(
        weights=name,
        match="fits" if residual <= EXPERT_FIT else "differs",
        weight_error=residual,
        activation=rounding.family if clear else "unclear",
        scale=" or ".join(dict.fromkeys(r.scale for r in same if r.scale)) if clear else "",
        residual=residual,
        differing="" if clear else f"closest: {rounding.family} {rounding.scale}".rstrip(),
        closest=rounding.family if not clear and residual <= EXPERT_FIT else "",
    )


def usual_roundings(k: int) -> list[Rounding]:
    """Every way of rounding an input of `k` columns that servers are known to use, but those with a stored scale."""

    def mxfp4(rule: str) -> Callable[[Tensor], Tensor]:
        return lambda x: reference.mxfp4_qdq_activation(x, rule)

    def mx_of(element: str, rule: str) -> Callable[[Tensor], Tensor]:
        return lambda x: mx.qdq_activation(x, element, rule)

    def of_tensor(x: Tensor, largest: float) -> Tensor:
        return reference.nvfp4_global_scale(x.float().abs().amax(), largest)

    found = [
        Rounding("none", "", lambda x: x),
        Rounding("nvfp4", "per token", reference.nvfp4_qdq_activation, NVFP4_BLOCK),
        Rounding("nvfp4", "per tensor", lambda x: _nvfp4(of_tensor(x, E2M1_MAX * E4M3_MAX))(x), NVFP4_BLOCK),
        *(Rounding("mxfp4", f"rule {rule}", mxfp4(rule), MXFP4_BLOCK) for rule in ("even", "floor", "rceil")),
        *(
            Rounding(f"mx{name}", f"rule {rule}", mx_of(element, rule), MXFP4_BLOCK)
            for name, element in (("fp6_e2m3", "e2m3"), ("fp6_e3m2", "e3m2"), ("fp8_e4m3", "e4m3"))
            for rule in ("floor", "rceil")
        ),
        Rounding("fp8", "per token", lambda x: scaled.qdq_activation(x, "e4m3")),
        Rounding("fp8", "per group of 128", lambda x: scaled.qdq_activation(x, "e4m3", group=128), 128),
        Rounding("fp8", "per tensor", lambda x: _fp8(of_tensor(x, E4M3_MAX))(x)),
        Rounding("int8", "per token", lambda x: scaled.qdq_activation(x, "int8")),
    ]
    return [rounding for rounding in found if k % rounding.block == 0]


def static_roundings(scales: Mapping[str, float], k: int) -> list[Rounding]:
    """The same with scales that a checkpoint stores, by name."""
    found = []
    for name, number in scales.items():
        scale = torch.tensor(number, dtype=torch.float32)
        found += [Rounding("nvfp4", name, _nvfp4(scale), NVFP4_BLOCK), Rounding("fp8", name, _fp8(scale))]
        found += [Rounding("int8", name, lambda x, s=scale: scaled.qdq_activation(x, "int8", s))]  # type: ignore[misc]
    return [rounding for rounding in found if k % rounding.block == 0]


# ---- private ---------------------------------------------------------------------------------------------------------


def _nvfp4(scale: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: reference.nvfp4_qdq_activation(x, scale)


def _fp8(scale: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: scaled.qdq_activation(x, "e4m3", scale)


class _Try:
    """A rounding applied to both batches, in the probed columns: what passes of the one-hot ones `[columns]`, and the
    seeded rows `[ROWS, columns]` in the large batch and alone."""

    def __init__(self, rounding: Rounding, together: Tensor, values: Tensor, columns: list[int]) -> None:
        self.rounding = rounding
        rounded = rounding.apply(together)[:, columns]
        self.passed = rounded[: len(columns)].diagonal()
        self.large, self.small = rounded[len(columns) :], rounding.apply(values)[:, columns]


@functools.lru_cache(maxsize=16)  # a model has few widths, and many layers of each
def _usual_tries(k: int, dtype: torch.dtype) -> tuple[_Try, ...]:
    columns = probe_columns(k)
    one_hot, values = probe_inputs(k, columns, dtype)
    together = torch.cat([one_hot, values])
    return tuple(_Try(rounding, together, values, columns) for rounding in usual_roundings(k))


def _probe_part(part: Part, tries: list[_Try], small: Tensor, large: Tensor, dtype: torch.dtype) -> Facts:
    came_out = large[:-ROWS]
    few = _choose(tries, came_out, small, lambda t: t.small, dtype)
    many = _choose(tries, came_out, large[-ROWS:], lambda t: t.large, dtype)
    differing = ""
    if few and many and (few.family, few.scales) != (many.family, many.scales):
        common = tuple(s for s in many.scales if s in few.scales)
        if few.family == many.family and common:
            many = dataclasses.replace(many, scales=common)
        else:
            differing = f"{_say(few)} at {ROWS} rows, {_say(many)} at {large.shape[0]}"
    best = many or few
    passed = best.tried.passed if best else torch.ones(came_out.shape[0])
    weights, match, error = _identify(part.weights, passed, came_out, dtype)
    if many is None or few is None:
        return Facts(weights=weights, match=match, weight_error=error, activation="unclear", differing=differing)
    return Facts(
        weights=weights,
        match=match,
        weight_error=error,
        activation=many.family,
        scale=" or ".join(many.scales),
        residual=max(few.residual, many.residual),
        differing=differing,
    )


def _choose(
    tries: list[_Try], came_out: Tensor, y: Tensor, rows: Callable[[_Try], Tensor], dtype: torch.dtype
) -> _Choice | None:
    """The rounding under which the columns that came out predict `y` `[ROWS, N]`; None when none does, clearly."""
    fits = []
    for tried in tries:
        if bool((tried.passed != 0).all()):
            weight = came_out / tried.passed.unsqueeze(1)  # [columns, N]
            fits.append((_misfit(y, rows(tried) @ weight), tried))
    fits.sort(key=lambda fit: fit[0])
    plain = next(fit for fit in fits if fit[1].rounding.family == "none")
    if plain[0] <= torch.finfo(dtype).eps / 2 and plain[0] < CLEAR * fits[0][0]:
        # What the output's own rounding hides is no rounding: a router's few outputs tell little apart.
        return _Choice(family="none", scales=(), residual=plain[0], tried=plain[1])
    residual, best = fits[0]
    family = best.rounding.family
    enough = max(CLEAR * residual, EXACT)
    if residual > LINEAR_FIT or any(error < enough for error, t in fits if t.rounding.family != family):
        return None
    same = [t.rounding.scale for error, t in fits if t.rounding.family == family and error < enough]
    return _Choice(family=family, scales=tuple(s for s in dict.fromkeys(same) if s), residual=residual, tried=best)


def _identify(
    candidates: Mapping[str, Tensor], passed: Tensor, came_out: Tensor, dtype: torch.dtype
) -> tuple[str, str, float]:
    """(candidate, match, relative error) of the columns that came out `[columns, N]`; ("", "", NaN) without any.

    passed: what is left of the ones `[columns]` after the input's rounding.
    """
    step = torch.finfo(dtype).eps
    best = ("", "", float("nan"))
    whole = came_out
    for name, weight in candidates.items():
        came_out = whole[:, : weight.shape[0]]  # the rest is padding
        exact = passed.unsqueeze(1) * weight.T
        decoded = passed.to(dtype).float().unsqueeze(1) * weight.T.to(dtype).float()  # to the dtype before the product
        expected = decoded.to(dtype).float()
        error = _misfit(came_out, exact)
        if torch.equal(came_out, expected) or _same_bits(came_out, exact, dtype):
            return name, "exact", 0.0
        match = "differs"
        factor = float((came_out.double() * exact.double()).sum() / exact.double().square().sum().clamp(min=1e-300))
        if bool(((came_out - exact).abs() <= step * exact.abs()).all()):
            match = "rounded"
        elif factor > 0 and bool(((came_out / factor - exact).abs() <= step * exact.abs()).all()):
            match = f"scaled by {factor:.4g}"
        if not best[0] or (best[1] == "differs" and match != "differs") or (best[1] == match and error < best[2]):
            best = (name, match, error)
    return best


def _same_bits(came_out: Tensor, exact: Tensor, dtype: torch.dtype) -> bool:
    """Whether float32 products came out in `dtype`, whichever way their own last bit was rounded: a decode multiplier
    may go on the weight or on the product."""
    ends = torch.full_like(exact, math.inf)
    around = [value.to(dtype).float() for value in (exact, exact.nextafter(ends), exact.nextafter(-ends))]
    return bool(((came_out == around[0]) | (came_out == around[1]) | (came_out == around[2])).all())


def _misfit(y: Tensor, predicted: Tensor) -> float:
    """Relative root mean square error of a prediction."""
    y, predicted = y.double(), predicted.double()
    power = float(y.square().sum())
    if power == 0:
        return 0.0 if float(predicted.square().sum()) == 0 else float("inf")
    misfit = float(((y - predicted).square().sum() / power).sqrt())
    return float("inf") if math.isnan(misfit) else misfit


def _expert_misfit(y: Tensor, predicted: Tensor, *, any_factor: bool = False) -> float:
    """The same of rows `[ROWS, H]`, each against its own power, over the EXPERT_ROWS that fit best; any_factor: after
    the factor that fits best. A value that is no number anywhere is no fit."""
    y, predicted = y.double(), predicted.double()
    if not bool(y.isfinite().all() & predicted.isfinite().all()):
        return float("inf")
    power = y.square().sum(1)
    if any_factor:
        weight = torch.where(power > 0, 1 / power, 0).unsqueeze(1)
        factor = (y * predicted * weight).sum() / (predicted.square() * weight).sum().clamp(min=1e-300)
        predicted = predicted * factor.clamp(min=0)
    error = (y - predicted).square().sum(1)
    relative = torch.where(error > 0, error / power, 0)  # a dead row that should live: infinite
    return float(relative.sort().values[:EXPERT_ROWS].mean().sqrt())


def merge_facts(found: list[Facts], names: list[str]) -> Facts:
    """Facts of a layer from those of its matrices (or experts): the worst, and what they differ in. names: of each."""
    if len(found) == 1:
        return found[0]
    found = _as_the_clear_ones(found)
    worst = max(found, key=lambda f: (MATCHES.index(f.match.split(" ")[0]), f.weight_error))
    differing = [f"{n}: {f.differing}".lstrip(": ") for n, f in zip(names, found, strict=True) if f.differing]
    kinds = {f.activation for f in found}
    common = set.intersection(*(set(f.scale.split(" or ")) for f in found))
    if len(kinds) == 1 and common:
        scale = " or ".join(s for s in worst.scale.split(" or ") if s in common)
        return _replace(worst, found, worst.activation, scale, differing)
    said = [f"{n}: {f.activation} {f.scale}".rstrip() for n, f in zip(names, found, strict=True)]
    return _replace(worst, found, kinds.pop() if len(kinds) == 1 else "unclear", "mixed", [*differing, *said])


def _as_the_clear_ones(found: list[Facts]) -> list[Facts]:
    """An unclear expert whose best fit is what all clear ones run, with the same weights, runs that: a fine rounding of
    one expert's input may be lost in its output's own.
    """
    clear = [f for f in found if f.activation != "unclear"]
    if len({(f.weights, f.activation) for f in clear}) != 1:
        return found
    kind = clear[0]
    return [
        dataclasses.replace(f, activation=kind.activation, scale=kind.scale, differing="", closest="")
        if f.activation == "unclear" and (f.weights, f.closest) == (kind.weights, kind.activation)
        else f
        for f in found
    ]


def _replace(worst: Facts, found: list[Facts], activation: str, scale: str, differing: list[str]) -> Facts:
    return Facts(
        weights="+".join(dict.fromkeys(f.weights for f in found if f.weights)),
        match=worst.match,
        weight_error=worst.weight_error,
        activation=activation,
        scale=scale,
        residual=max(f.residual for f in found),
        differing="; ".join(dict.fromkeys(differing)),
    )


def _own_scales(own: float, all_scales: list[float]) -> dict[str, float]:
    """Static scales to try: the matrix's own, and the largest of those it is run with."""
    known = [s for s in all_scales if not math.isnan(s)]
    scales = {} if math.isnan(own) else {"static": own}
    if known and max(known) != own:
        scales["static, the largest of the fused matrices"] = max(known)
    return scales


def _expert_scales(own: float, largest: float) -> dict[str, float]:
    scales = {} if math.isnan(own) else {"static": own}
    if not math.isnan(largest) and largest != own:
        scales["static, the largest of the experts"] = largest
    return scales


def _say(choice: _Choice) -> str:
    return f"{choice.family} {' or '.join(choice.scales)}".rstrip()
