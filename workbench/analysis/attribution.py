"""Where a quantization's error comes from: scale, element, saturation or underflow. The four parts sum to the total.

x becomes x_hat in a block whose stored scale makes one unit of a code worth `step`; `largest` is the element format's
largest magnitude (6 for E2M1). Each element's squared error (x_hat - x)^2 is counted once:

- saturation: |x| > largest * step. All of it: the scale does not reach the element.
- underflow: x is not zero, x_hat is, and x does not saturate. All of it.
- otherwise it is divided: the *element* part is the squared error that the element format would make with the block's
  unrounded scale, (largest magnitude of the block) / largest; the *scale* part is the rest, negative where rounding the
  scale happened to help.

So element + scale + saturation + underflow = sum of (x_hat - x)^2 exactly, by definition. NVFP4's E4M3 scales are close
to the unrounded ones and MXFP4's powers of two are not: the scale part says what a finer scale could win.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from workbench.kernels import cpu_errors, torch_errors

from .sides import largest_code


class Attribution(NamedTuple):
    """Sums of squares over a matrix: the four parts and their total. saturated, underflowed: elements."""

    scale: float
    element: float
    saturation: float
    underflow: float
    total: float
    saturated: float
    underflowed: float


def part_sums(
    x: Tensor, x_hat: Tensor, steps: Tensor, block: int, element: str, loops: bool, piece: int = torch_errors.PIECE
) -> NDArray[np.float64]:
    """`cpu_errors.PARTS` of some rows, any float element. x, x_hat: `[R, K]`; steps: a block's each, flat. loops: by
    the compiled ones where they have the element; piece: values at once otherwise."""
    columns, largest = block or x.shape[-1], largest_code(element)
    if loops and element == "e2m1":
        return cpu_errors.attribute(x.float(), x_hat, steps, block=columns, largest=largest)
    found: NDArray[np.float64] = (
        torch_errors.attribute(x, x_hat, steps, block=columns, element=element, largest=largest, piece=piece)
        .cpu()
        .numpy()
    )
    return found


def attribution_of(parts: NDArray[np.float64]) -> Attribution:
    """The division of the whole matrix from the sums of its chunks."""
    saturation, underflow, element, total, saturated, underflowed = (float(v) for v in parts)
    scale = total - saturation - underflow - element
    return Attribution(scale, element, saturation, underflow, total, saturated, underflowed)
