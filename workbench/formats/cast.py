"""MXFP4 to NVFP4 without rounding, where the spread of a tensor's scales allows it.

    q_nvfp4, lossy_blocks = mxfp4_to_nvfp4(q_mxfp4)

An E4M3 scale holds 2**-9 to 2**8 exactly. With the global scale 2**(k_max - 8), a block of 32 with exponent k becomes
two of 16 with the scale 2**(k - k_max + 8) and the same codes: always exact where k_max - k <= 17. A smaller block gets
the smallest scale, and its elements are rounded to it; even they may fit. ModelOpt casts MXFP4 checkpoints likewise.
"""

from __future__ import annotations

import torch

from workbench.errors import FormatError
from workbench.kernels.elements import decode, encode, pack
from workbench.kernels.tables import E8M0_BIAS, E8M0_NAN, MXFP4_BLOCK, NVFP4_BLOCK

from .tensor import QuantizedTensor

_E4M3_EXPONENTS = (-9, 8)  # powers of two that E4M3 holds
_SMALLEST_GLOBAL = -118  # log2 of the smallest global scale in use (`kernels.tables.NVFP4_MIN_GLOBAL`)


def mxfp4_to_nvfp4(q: QuantizedTensor) -> tuple[QuantizedTensor, int]:
    """`q` (mxfp4) as nvfp4, and how many of its blocks of 32 did not keep every value.

    input_scale and pre_quant_scale go along. Raises FormatError for another format or a NaN scale (byte 255).
    """
    if q.format != "mxfp4":
        raise FormatError(f"a cast from mxfp4, but the tensor is {q.format}", fix="dequantize and quantize it instead")
    if bool((q.block_scales == E8M0_NAN).any()):
        raise FormatError("the mxfp4 tensor has NaN scales (byte 255)", fix="export the source checkpoint again")
    low, high = _E4M3_EXPONENTS
    values = decode(q.codes, "e2m1").unflatten(-1, (-1, MXFP4_BLOCK))
    live = values.abs().amax(-1) > 0
    k = q.block_scales.int() - E8M0_BIAS
    largest = int(k[live].max()) if bool(live.any()) else high
    global_exponent = max(largest - high, _SMALLEST_GLOBAL)
    wanted = torch.where(live, k - global_exponent, 0)  # a zero block's scale is 1.0
    stored = wanted.clamp(min=low)
    factor = torch.exp2((wanted - stored).float()).unsqueeze(-1)  # below 1 only where the scale does not reach down
    codes = encode(values * factor, "e2m1")
    lossy = int(((decode(pack(codes, "e2m1"), "e2m1") != values * factor).any(-1)).sum())
    scales = torch.exp2(stored.float()).to(torch.float8_e4m3fn)
    return (
        QuantizedTensor(
            format="nvfp4",
            codes=pack(codes.flatten(-2), "e2m1"),
            block_scales=scales.view(torch.uint8).repeat_interleave(MXFP4_BLOCK // NVFP4_BLOCK, -1).view(scales.dtype),
            global_scale=torch.tensor(2.0**global_exponent, dtype=torch.float32),
            shape=q.shape,
            input_scale=q.input_scale,
            pre_quant_scale=q.pre_quant_scale,
        ),
        lossy,
    )
