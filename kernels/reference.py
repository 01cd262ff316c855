"""The definition: NVFP4 and MXFP4 under their plain rules, exact in float32.

Every faster path is compared with these functions bit for bit. They favour being read over being fast: a step is one
line of arithmetic on float32. Weights are `[..., N, K]` with blocks along K; packed codes are `[..., N, K/2]` uint8
with the even K index in the low nibble.

    codes, scales, global_scale = nvfp4_quantize(w_nk)
    w_hat_nk = nvfp4_dequantize(codes, scales, global_scale)

The other rules of both, the producers' included, are in `nvfp4.py` and `mx.py`, other element formats in `elements.py`,
FP8 and INT in `scaled.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .tables import (
    E2M1_EMAX,
    E2M1_MAGNITUDES,
    E2M1_MAX,
    E2M1_MIDPOINTS,
    E4M3_MAX,
    E4M3_MIN_SUBNORMAL,
    E8M0_BIAS,
    E8M0_NAN,
    MXFP4_BLOCK,
    MXFP4_MAX_SCALE_BYTE,
    NVFP4_BLOCK,
    NVFP4_MIN_GLOBAL,
    ScaleRule,
)

# ---- E2M1 elements ---------------------------------------------------------------------------------------------------


def e2m1_round(x: Tensor) -> Tensor:
    """Round float32 `x` to E2M1 codes (uint8, 0..15): nearest, ties to the even code, saturating at 6.

    Minus zero keeps its sign (code 8). NaN has no code in E2M1 and is the caller's to refuse.
    """
    x = x.float()
    magnitude = x.abs()
    midpoints = torch.tensor(E2M1_MIDPOINTS, dtype=torch.float32, device=x.device)
    code = torch.bucketize(magnitude, midpoints)  # a value on a midpoint takes the lower neighbour ...
    on_tie = (magnitude == 0.75) | (magnitude == 1.75) | (magnitude == 3.5)  # ... unless that code is odd
    code = code + on_tie.to(code.dtype)
    return (code + 8 * torch.signbit(x).to(code.dtype)).to(torch.uint8)


def e2m1_values(codes: Tensor) -> Tensor:
    """E2M1 codes (uint8, 0..15) to float32 values; code 8 is -0.0."""
    magnitudes = list(E2M1_MAGNITUDES)
    table = torch.tensor(magnitudes + [-m for m in magnitudes], dtype=torch.float32, device=codes.device)
    return table[codes.long()]


def pack_fp4(codes: Tensor) -> Tensor:
    """Codes `[..., K]` to bytes `[..., K/2]`: the even K index in the low nibble."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).contiguous()


def unpack_fp4(packed: Tensor) -> Tensor:
    """Bytes `[..., K/2]` to codes `[..., K]`."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


# ---- Block scales ----------------------------------------------------------------------------------------------------


def e4m3_round(x: Tensor) -> Tensor:
    """Float32 to float8_e4m3fn: nearest even, saturating at +-448 (a bare cast may give NaN above 464)."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def e8m0_values(scale_bytes: Tensor) -> Tensor:
    """E8M0 bytes to float32: 2**(b - 127); byte 0 is the subnormal 2**-127, byte 255 is NaN."""
    byte = scale_bytes.to(torch.int32)
    value = torch.where(byte == 0, 1 << 22, byte << 23).view(torch.float32)  # the byte is float32's biased exponent
    return torch.where(byte == E8M0_NAN, torch.full_like(value, torch.nan), value)


def mx_exponents(
    amax: Tensor, rule: ScaleRule | str, *, emax: int = E2M1_EMAX, largest: float = E2M1_MAX, mantissa_bits: int = 1
) -> Tensor:
    """Exponents k (int32) of the shared scale 2**k for block maxima `amax` (float32, finite, > 0), unclamped.

    emax, largest, mantissa_bits: of the element format; E2M1 by default. rule: floor, even, ceil or rceil, else
    ValueError. log2 is taken from the float's bits: float log2 errs near powers of two.
    """
    rule = ScaleRule(rule)
    mantissa, exponent = torch.frexp(amax.float())  # amax = mantissa * 2**exponent, mantissa in [0.5, 1)
    significand = mantissa * 2  # in [1, 2), exact
    k = exponent - 1 - emax
    if rule is ScaleRule.FLOOR:
        return k
    if rule is ScaleRule.EVEN:
        return k + (significand >= 2 - 0.5 ** (mantissa_bits + 1)).int()
    if rule is ScaleRule.CEIL:
        return k + (significand > 1.0).int()
    if rule is ScaleRule.RCEIL:  # amax / largest = (significand / largest's significand) * 2**k
        return k + (significand > largest / 2**emax).int()
    raise ValueError(f"MXFP4 has no scale rule {rule.value!r} of the exponent alone; choose floor, even, rceil or ceil")


def mxfp4_scale_bytes(amax: Tensor, rule: ScaleRule | str) -> Tensor:
    """Block maxima (float32, >= 0) to E8M0 bytes under `rule`; a zero block gets byte 0, NaN or infinity byte 255.

    The byte is at most 252, so that the largest element, 6 * 2**125, is finite in float32 (maxima from 1.5 * 2**127 on
    saturate).
    """
    amax = amax.float()
    byte = (mx_exponents(amax, rule) + E8M0_BIAS).clamp(0, MXFP4_MAX_SCALE_BYTE)
    byte = torch.where(amax == 0, torch.zeros_like(byte), byte)
    return torch.where(amax.isfinite(), byte, torch.full_like(byte, E8M0_NAN)).to(torch.uint8)


# ---- NVFP4 -----------------------------------------------------------------------------------------------------------


def exact_quotient(x: Tensor, number: float) -> Tensor:
    """x / number in x's dtype, rounded once on every device: CUDA makes `x / number` x * (1 / number)."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def nvfp4_global_scale(amax: Tensor, divisor: float = E2M1_MAX * E4M3_MAX) -> Tensor:
    """Decode multiplier of a tensor with largest magnitude `amax`: amax / divisor, float32; 1.0 for an all-zero one.

    ModelOpt writes 0 for an all-zero matrix and NaN block scales with it; 1.0 keeps every stored value finite. For the
    same reason it is at least 2**-118: below, 1 / global / block scale leaves float32 (amax < 9e-33 only).
    """
    amax = amax.float()
    scale = exact_quotient(amax, divisor).clamp(min=NVFP4_MIN_GLOBAL)
    return torch.where(amax == 0, torch.ones_like(amax), scale)


def nvfp4_block_scales(amax_blocks: Tensor, global_scale: Tensor) -> Tensor:
    """Block maxima to E4M3 scales as ModelOpt's amax rule: a / (6 * global); 0 becomes 1.0; clamped to [2**-9, 448]."""
    scale = amax_blocks.float() / (E2M1_MAX * global_scale)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return e4m3_round(scale.clamp(E4M3_MIN_SUBNORMAL, E4M3_MAX))


def nvfp4_quantize(w: Tensor, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize `w` `[..., K]` (K divisible by 16) to NVFP4 by the amax rule.

    `global_scale`: float32 decode multiplier, broadcastable to `[..., 1]`; by default from the whole tensor's amax.
    Returns packed codes `[..., K/2]` uint8, block scales `[..., K/16]` float8_e4m3fn and the global scale (float32).
    """
    w = w.float()
    if global_scale is None:
        global_scale = nvfp4_global_scale(w.abs().amax() if w.numel() else w.new_zeros(()))
    global_scale = global_scale.float()
    blocks = w.unflatten(-1, (-1, NVFP4_BLOCK))  # [..., K/16, 16]
    scales = nvfp4_block_scales(blocks.abs().amax(-1), global_scale)
    codes = e2m1_round(blocks / (scales.float() * global_scale).unsqueeze(-1)).flatten(-2)
    return pack_fp4(codes), scales, global_scale


def nvfp4_dequantize(packed: Tensor, scales: Tensor, global_scale: Tensor) -> Tensor:
    """NVFP4 to float32 `[..., K]`: e2m1 * (e4m3 * global). `global_scale` broadcasts against `scales`."""
    values = e2m1_values(unpack_fp4(packed)).unflatten(-1, (-1, NVFP4_BLOCK))
    return (values * (scales.float() * global_scale.float()).unsqueeze(-1)).flatten(-2)


def nvfp4_qdq_activation(x: Tensor, global_scale: Tensor | None = None) -> Tensor:
    """Quantize-dequantize activations `x` `[M, K]` through NVFP4; returns x's dtype.

    `global_scale` is the decode multiplier (a checkpoint's `input_scale`), scalar or `[M, 1]`; None takes each row's
    own amax / (6 * 448), so that a token's result does not depend on its batch. The block scale is
    e4m3(G * (a * (1/6))) with G = 1 / global_scale and no lower clamp, as vLLM's emulation computes it: a block whose
    scale underflows becomes 0.
    """
    x32 = x.float()
    if global_scale is None:
        global_scale = nvfp4_global_scale(x32.abs().amax(-1, keepdim=True))
    encode = 1.0 / global_scale.float()
    blocks = x32.unflatten(-1, (-1, NVFP4_BLOCK))  # [M, K/16, 16]
    scale = e4m3_round(encode * (blocks.abs().amax(-1) * (1.0 / E2M1_MAX))).float()
    step_inverse = torch.where(scale == 0, torch.zeros_like(scale), encode / scale)
    step = scale / encode
    scaled = (blocks * step_inverse.unsqueeze(-1)).clamp(-E2M1_MAX, E2M1_MAX)
    return (e2m1_values(e2m1_round(scaled)) * step.unsqueeze(-1)).flatten(-2).to(x.dtype)


# ---- MXFP4 -----------------------------------------------------------------------------------------------------------


def mxfp4_quantize(w: Tensor, rule: ScaleRule | str = ScaleRule.EVEN) -> tuple[Tensor, Tensor]:
    """Quantize `w` `[..., K]` (K divisible by 32) to MXFP4.

    Returns packed codes `[..., K/2]` uint8 and E8M0 scale bytes `[..., K/32]` uint8.
    """
    blocks = w.float().unflatten(-1, (-1, MXFP4_BLOCK))  # [..., K/32, 32]
    scale_bytes = mxfp4_scale_bytes(blocks.abs().amax(-1), rule)
    # x / 2**k in float64 is exact also for byte 0 (2**-127), whose reciprocal float32 holds but some CPUs flush.
    scaled = (blocks.double() / e8m0_values(scale_bytes).double().unsqueeze(-1)).float()
    return pack_fp4(e2m1_round(scaled).flatten(-2)), scale_bytes


def mxfp4_dequantize(packed: Tensor, scale_bytes: Tensor) -> Tensor:
    """MXFP4 to float32 `[..., K]`: e2m1 * 2**(byte - 127); byte 255 gives NaN."""
    values = e2m1_values(unpack_fp4(packed)).unflatten(-1, (-1, MXFP4_BLOCK))
    return (values * e8m0_values(scale_bytes).unsqueeze(-1)).flatten(-2)


def mxfp4_qdq_activation(x: Tensor, rule: ScaleRule | str = ScaleRule.EVEN) -> Tensor:
    """Quantize-dequantize activations `x` `[M, K]` through MXFP4 (dynamic, per block of 32); returns x's dtype."""
    return mxfp4_dequantize(*mxfp4_quantize(x, rule)).to(x.dtype)
