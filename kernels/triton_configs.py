"""How the GEMM kernels divide their work, and which kernel takes how many tokens.

    config = triton_configs.registers(device, n, programs, k, tokens)

The shapes are the fastest of those that `tests/kernels/gpu_tune.py` timed on an H200 (Triton 3.6; N = K = 8192, and 384
experts of 7168 x 512 and 256 x 7168); how many programs share K follows the card's number of multiprocessors. On any
other card `triton_tuning` tries the `*_CANDIDATES` beside them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from .triton_launch import multiprocessors

REGISTER_TOKENS = 16  # at most so many tokens take `triton_gemm_registers` where `triton_gemm_wgmma` runs too
WGMMA_TOKENS = 256  # at most so many take `triton_gemm_wgmma`; more, the decoded weight and the vendor's GEMM


class Config(NamedTuple):
    """How a program of `triton_gemm_registers` divides its work; it takes 16 * row_warps * groups rows."""

    slices: int  # warps that share K
    row_warps: int  # warps that share the rows
    groups: int  # of 16 rows, that a warp takes
    split: int = 1  # programs that share K
    registers: int = 128  # of a thread


def tokens_tile(tokens: int) -> int:
    """Tokens that a program of `triton_gemm_registers` multiplies, padded."""
    return max(8, min(32, int(triton.next_power_of_2(tokens))))


def registers(device: torch.device, n: int, programs: int, k: int, tokens: int) -> Config:
    """For N rows, `programs` groups of at most `tokens` tokens, and K of `k`."""
    chunks = triton.cdiv(k, 128)
    processors = multiprocessors(device)
    by_32_rows = triton.cdiv(n, 32) * programs
    if chunks < 4:  # so little of K that no warps need to share it
        return Config(1, 2, 2) if tokens <= 16 else Config(1, 4, 2, registers=255)
    if tokens > 16:
        return Config(4, 2, 2, registers=255)
    slices = 4 if chunks < 8 or by_32_rows >= 3 * processors else 8
    if tokens > 8 and by_32_rows > processors:
        return Config(4, 2, 2, registers=168)
    if by_32_rows >= processors:
        return Config(slices, 1, 2)
    split = 1
    while 2 * by_32_rows * split * 2 <= processors and chunks >= 2 * slices * split:
        split *= 2
    return Config(slices, 1, 1, split)


class WideConfig(NamedTuple):
    """How a program of `triton_gemm_wgmma` divides its work; it takes 64 * warpgroups rows."""

    tokens: int  # that it multiplies
    warpgroups: int
    split: int = 1  # programs that share K
    stages: int = 3  # chunks of tokens in shared memory


def wgmma(device: torch.device, n: int, k: int, m: int) -> WideConfig:
    """For N rows, K of `k` and M tokens."""
    tokens, at_a_time = (64, 4) if m <= 64 else (128, 2)  # and programs that a multiprocessor runs side by side
    split = 1
    programs = triton.cdiv(n, 64) * triton.cdiv(m, tokens)
    while programs * split * 2 <= at_a_time * multiprocessors(device) and k // 128 >= 8 * split:
        split *= 2
    return WideConfig(tokens, 1, split)


def wgmma_experts(tokens: int, k: int) -> WideConfig:
    """For groups of at most `tokens` tokens that share an expert, and K of `k`."""
    return WideConfig(tokens, 1, stages=2 if tokens == 64 or (tokens == 128 and k < 1024) else 3)


class Tile(NamedTuple):
    """How a program of the portable kernels (`triton_gemm`, `triton_moe`) divides its work."""

    rows: int  # of the weight
    columns: int  # of K that it decodes at a time
    warps: int
    stages: int
    split: int = 0  # programs that share K; 0: as many as fill the card


# By the tokens that a program multiplies.
TILES = {16: Tile(64, 256, 4, 3), 32: Tile(64, 128, 4, 3), 64: Tile(64, 128, 4, 3)}

# What is tried where nothing was measured, and by `tests/kernels/gpu_tune.py`. Registers: by tokens of a program.
REGISTER_CANDIDATES = {
    8: [Config(8, 1, 2), Config(8, 2, 2), Config(4, 1, 1, 1, 96), Config(4, 1, 2), Config(8, 1, 2, 1, 168)],
    16: [Config(8, 1, 2), Config(8, 2, 2), Config(4, 2, 2, 1, 168), Config(4, 1, 2)],
    32: [Config(4, 1, 2, 1, 255), Config(4, 2, 2, 1, 255)],
}
UP_CANDIDATES = {  # experts whose K is long
    8: [Config(8, 1, 1), Config(4, 1, 2), Config(8, 1, 2)],
    32: [Config(2, 4, 2, 1, 255), Config(4, 2, 2, 1, 255)],
}
DOWN_CANDIDATES = {  # experts whose K is short
    8: [Config(2, 2, 2), Config(1, 4, 2), Config(1, 2, 2)],
    32: [Config(1, 4, 2, 1, 255)],
}
WIDE_CANDIDATES = [
    WideConfig(32, 1, 2, 3),
    WideConfig(64, 1, 2, 3),
    WideConfig(64, 1, 4, 3),
    WideConfig(64, 2, 2, 3),
    WideConfig(128, 1, 2, 3),
    WideConfig(128, 1, 2, 2),
    WideConfig(128, 1, 1, 3),
    WideConfig(256, 1, 1, 2),
]
WIDE_EXPERT_CANDIDATES = [
    WideConfig(128, 1, 1, 2),
    WideConfig(128, 1, 1, 3),
    WideConfig(64, 1, 1, 2),
    WideConfig(64, 1, 1, 3),
    WideConfig(128, 2, 1, 2),
    WideConfig(32, 1, 1, 3),
]
TILE_CANDIDATES = [
    Tile(32, 128, 4, 2),
    Tile(32, 256, 4, 3),
    Tile(64, 64, 4, 3),
    Tile(64, 128, 4, 2),
    Tile(64, 128, 4, 3, 1),
    Tile(64, 128, 8, 3),
    Tile(64, 256, 8, 2),
    Tile(128, 64, 4, 2),
    Tile(128, 64, 8, 3),
    Tile(128, 128, 8, 2),
]
