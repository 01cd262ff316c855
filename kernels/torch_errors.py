"""The sums of the error algebra in plain torch, on whatever device the values lie; `cpu_errors` has the same compiled.

    units = error_sums(w, a, b, d, unit=1024, run=131072)      # float64 [units, len(SUMS)]
    parts = attribute(w, a, step_of_block, block=16, element="e2m1", largest=6.0)

Definitions, columns and names are `cpu_errors`'. Every difference, product and sum is float64; counts are equal to the
compiled loops' and sums differ by the order of summation alone. Values go through in pieces of about PIECE elements, so
that the float64 copies take some 10 * 8 * PIECE bytes. Nothing waits for the device, and no sum uses atomics: one
device repeats to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .cpu_errors import E2M1_CODES, SUMS
from .elements import decode, encode, pack

PIECE = 1 << 24
_E2M1_STARTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # midpoints; no stored value lies on one


def error_sums(
    w: Tensor, a: Tensor, b: Tensor, d: Tensor | None, *, unit: int, run: int | None = None, piece: int = PIECE
) -> Tensor:
    """SUMS over runs of `unit` consecutive elements, `[units, 16]` float64 on the values' device.

    run: elements after which units begin anew, the last of a run being shorter where `unit` does not divide it; None:
    one run. So rows taken together give the units that they give apart. w, a, b, d: any float dtype, equally many
    elements; d None: its sums are 0.
    """
    arms = [None if t is None else t.detach().reshape(-1) for t in (w, a, b, d)]
    n = w.numel()
    run = min(run or n, n)
    whole = n // run * run
    found = []
    for start, stop, length in ((0, whole, run), (whole, n, n - whole)):
        if start == stop:
            continue
        part = [None if t is None else t[start:stop].view(-1, length) for t in arms]
        body = length // unit * unit
        if body == length or stop - start > length:  # zeros fill up a run's last unit, and change no sum
            fill = -length % unit
            padded = [t if t is None or not fill else torch.nn.functional.pad(t, (0, fill)) for t in part]
            found += _unit_sums([None if t is None else t.reshape(-1, unit) for t in padded], piece)
            continue
        if body:
            found += _unit_sums([None if t is None else t[:, :body].reshape(-1, unit) for t in part], piece)
        found += _unit_sums([None if t is None else t[:, body:] for t in part], piece)
    return torch.cat(found)


def block_energies(w: Tensor, b: Tensor, *, block: int, piece: int = PIECE) -> Tensor:
    """Sum of (b - w) squared over each run of `block` elements, float64 `[n / block]`; `block` divides n."""
    w, b = w.reshape(-1, block), b.reshape(-1, block)
    return torch.cat([(b[s].double() - w[s].double()).square_().sum(-1) for s in _slices(len(w), block, piece)])


def attribute(
    x: Tensor, x_hat: Tensor, steps: Tensor, *, block: int, element: str, largest: float, piece: int = PIECE
) -> Tensor:
    """PARTS of the error of rounding `x` to blocks of any float `element`, float64 `[6]`.

    x, x_hat: float32, n elements; steps: float32 `[n / block]`; largest: the element's largest magnitude.
    """
    x, x_hat, steps = x.reshape(-1, block), x_hat.reshape(-1, block), steps.reshape(-1, 1)
    found = [_parts(x[s].float(), x_hat[s].float(), steps[s], element, largest) for s in _slices(len(x), block, piece)]
    return torch.stack(found).sum(0)


def code_sums(a: Tensor, b: Tensor, steps: Tensor, *, block: int) -> Tensor:
    """For each E2M1 code of b: how many, and the sums of e2 = b - a and of its square, float64 `[16, 3]`.

    For some 100,000 elements: 16 float64 copies of them are made. a, b: float32; steps: float32 `[n / block]`.
    """
    a, b = a.reshape(-1), b.reshape(-1)
    inverse = torch.where(steps == 0, torch.zeros_like(steps), torch.ones_like(steps) / steps)
    m = (b.abs().view(-1, block) * inverse.view(-1, 1)).view(-1)
    codes = torch.zeros_like(m, dtype=torch.int32)
    for start in _E2M1_STARTS:
        codes += m > start
    codes += 8 * ((b < 0) & (codes > 0)).int()
    mine = codes == torch.arange(E2M1_CODES, dtype=torch.int32, device=b.device).unsqueeze(1)  # [16, n]
    e2 = b.double() - a.double()
    zero = torch.zeros((), dtype=torch.float64, device=b.device)
    sums = (torch.where(mine, e2, zero).sum(1), torch.where(mine, e2 * e2, zero).sum(1))
    return torch.stack((mine.sum(1).double(), *sums), dim=1)


def _slices(rows: int, columns: int, piece: int) -> Iterator[slice]:
    step = max(1, piece // max(1, columns))
    return (slice(start, min(rows, start + step)) for start in range(0, rows, step))


def _unit_sums(arms: list[Tensor | None], piece: int) -> list[Tensor]:
    """SUMS of each row; arms: w, a, b, d, `[units, unit]`."""
    w, a, b, d = arms
    assert w is not None
    assert a is not None
    assert b is not None
    return [_sums(w[s], a[s], b[s], None if d is None else d[s]) for s in _slices(*w.shape, piece)]


def _sums(w: Tensor, a: Tensor, b: Tensor, d: Tensor | None) -> Tensor:
    x, y, z = w.double(), a.double(), b.double()
    products = torch.empty_like(x)

    def dot(left: Tensor, right: Tensor) -> Tensor:
        return torch.mul(left, right, out=products).sum(-1)

    e1, e2 = y - x, z - y
    del y
    e = z.sub_(x) if z.data_ptr() != b.data_ptr() else z - x
    found = {
        "w": x.sum(-1), "e1": e1.sum(-1), "e2": e2.sum(-1), "e": e.sum(-1),
        "w_w": dot(x, x), "e1_e1": dot(e1, e1), "e_e": dot(e, e),
        "w_e1": dot(x, e1), "w_e": dot(x, e), "e1_e2": dot(e1, e2),
    }  # fmt: skip
    del e, e1
    square = e2 * e2
    found |= {"e2_e2": square.sum(-1), "e2_e2_e2": dot(square, e2), "e2_e2_e2_e2": dot(square, square)}
    del e2, square
    if d is not None:
        ed = d.double() - x
        found |= {"ed": ed.sum(-1), "ed_ed": dot(ed, ed), "w_ed": dot(x, ed)}
    nothing = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    return torch.stack([found.get(name, nothing) for name in SUMS], dim=1)


def _parts(x: Tensor, x_hat: Tensor, steps: Tensor, element: str, largest: float) -> Tensor:
    """PARTS of some blocks `[blocks, block]`."""
    magnitude = x.abs()
    amax = magnitude.amax(-1, keepdim=True)
    # A tensor, not a number: CUDA multiplies by a number's reciprocal, which is not the quotient.
    exact = amax / torch.full_like(amax, largest)
    exact = torch.where(amax == 0, torch.ones_like(exact), exact)
    if element == "e2m1":
        ideal = _e2m1_magnitudes(magnitude / exact).mul_(exact)
    else:
        codes = encode((magnitude / exact).reshape(1, -1), element)
        ideal = decode(pack(codes, element), element).reshape(x.shape) * exact
    beyond = magnitude.double() > largest * steps.double().abs()
    lost = (x_hat == 0) & (magnitude > 0) & ~beyond
    squares = (x_hat.double() - x.double()).square_()
    of_element = (ideal.double() - magnitude.double()).square_()
    zero = torch.zeros((), dtype=torch.float64, device=x.device)
    return torch.stack(
        (
            torch.where(beyond, squares, zero).sum(),
            torch.where(lost, squares, zero).sum(),
            torch.where(beyond | lost, zero, of_element).sum(),
            squares.sum(),
            beyond.sum().double(),
            lost.sum().double(),
        )
    )


def _e2m1_magnitudes(m: Tensor) -> Tensor:
    """The E2M1 magnitude nearest to float32 m >= 0: whole steps of 1/2, 1 or 2, which `round` ties to the even code."""
    half, one, two = (torch.full((), step, dtype=m.dtype, device=m.device) for step in (0.5, 1.0, 2.0))
    step = torch.where(m < 2, half, torch.where(m < 4, one, two))
    return (m / step).round_().mul_(step).clamp_(max=6.0)
