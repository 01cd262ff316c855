"""What every Triton launch needs: checked shapes, flat contiguous tensors, and one global scale a block.

g, per_global = global_per_block(global_scale, scales.shape)
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

_PROGRAMS_PER_MULTIPROCESSOR = 4
STORED = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that the kernels read and write
EXACT = {"enable_fp_fusion": False}  # launch option: no multiply-add that the kernel does not write


def tile(weights: int) -> int:
    """Weights that a program takes; the interpreter, which pays a program and not a weight, takes more."""
    return 4 * weights if triton.knobs.runtime.interpret else weights


def flat_values(t: Tensor) -> Tensor:
    """`t` contiguous, in float32 where the kernels do not read its dtype."""
    t = t.contiguous()
    return t if t.dtype in STORED else t.float()


def scale_shape(shape: torch.Size, block: int) -> torch.Size:
    """Shape of the block scales of values of `shape`. Raises ValueError for a partial block: kernels check no index."""
    if not shape or shape[-1] % block:
        raise ValueError(f"the last dimension of {tuple(shape)} is not a multiple of the block of {block}")
    return torch.Size((*shape[:-1], shape[-1] // block))


def check_scales(packed: Tensor, scales: Tensor, block: int, per_byte: int = 2) -> torch.Size:
    """Shape of the values of `packed` codes. Raises ValueError where `scales` are not one a block."""
    shape = torch.Size((*packed.shape[:-1], per_byte * packed.shape[-1]))
    if scale_shape(shape, block) != scales.shape:
        raise ValueError(f"codes {tuple(packed.shape)} and block scales {tuple(scales.shape)} do not fit each other")
    return shape


def global_per_block(global_scale: Tensor, shape: torch.Size) -> tuple[Tensor, int]:
    """Global scales as a flat float32 tensor, and how many consecutive scales of `shape` share one; 0: all."""
    g = global_scale.float()
    if g.numel() == 1:
        return g.reshape(1), 0
    if g.shape[-1] == 1:
        return g.expand(*shape[:-1], 1).contiguous().view(-1), max(1, shape[-1])
    return g.expand(shape).contiguous().view(-1), 1


def bytes_of(t: Tensor) -> Tensor:
    """`t`'s bytes as uint8, contiguous."""
    return t.contiguous().view(torch.uint8)


def has_permute() -> bool:
    """Whether kernels may use NVIDIA's byte permutation, which neither AMD's cards nor the interpreter have."""
    return torch.version.hip is None and not triton.knobs.runtime.interpret


def has_packed_bfloat16(device: torch.device) -> bool:
    """Whether kernels may use NVIDIA's arithmetic on pairs of bfloat16 (compute capability 9.0 and later)."""
    return has_permute() and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def split_steps(steps: int, programs: int, device: torch.device, parts: int = 0) -> tuple[int, int]:
    """In how many parts a product's K goes so that few `programs` still fill the card, and the steps of a part.

    A part has at least two of the `steps`; none is empty. parts: asked for; 0: as many as fill the card.
    """
    parts = max(1, min(steps // 2, parts or _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device) // programs))
    steps_each = triton.cdiv(steps, parts)
    return triton.cdiv(steps, steps_each), steps_each


def multiprocessors(device: torch.device) -> int:
    """How many programs the card runs side by side, at one a multiprocessor; 1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
