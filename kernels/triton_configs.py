"""How the GEMM kernels divide their work, and which kernel takes how many tokens.

    config = triton_configs.registers(device, n, programs, k, tokens)

The shapes are the fastest of those that `tests/kernels/gpu_tune.py` timed on an H200 (Triton 3.6; N = K = 8192, and 384
experts of 7168 x 512 and 256 x 7168); how many programs share K follows the card's number of multiprocessors.
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
