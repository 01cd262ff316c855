"""Matrices cut into blocks that share a scale, and scales spread back over their elements.

    blocks = split_blocks(w_nk, (128, 128))       # [..., N/128, 128, K/128, 128]
    amax = blocks.abs().amax(BLOCK_DIMS)          # [..., N/128, K/128], the shape of the block scales
    steps_nk = spread(scales, (128, 128), w_nk.shape)

A block is (rows, columns); 0 stands for all rows, or all columns. Partial last blocks are filled up with zeros, which
change no largest magnitude, and cut off again by `join_blocks`.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_DIMS = (-3, -1)  # of `split_blocks`: the elements of one block


def split_blocks(w: Tensor, block: tuple[int, int]) -> Tensor:
    """`w` `[..., N, K]` (or `[K]`) as `[..., row blocks, rows, column blocks, columns]`."""
    w = w if w.dim() > 1 else w.unsqueeze(0)
    rows, columns = (b or max(1, d) for b, d in zip(block, w.shape[-2:], strict=True))
    missing_rows, missing_columns = -w.shape[-2] % rows, -w.shape[-1] % columns
    if missing_rows or missing_columns:
        w = torch.nn.functional.pad(w, (0, missing_columns, 0, missing_rows))
    return w.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))


def join_blocks(blocks: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `split_blocks` for a matrix of `shape`."""
    whole = blocks.flatten(-2).flatten(-3, -2)
    n, k = (*([1] if len(shape) == 1 else []), *shape)[-2:]
    return whole[..., :n, :k].reshape(shape)


def per_element(values: Tensor) -> Tensor:
    """One value a block `[..., row blocks, column blocks]`, shaped to broadcast against `split_blocks`."""
    return values[..., :, None, :, None]


def spread(values: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """One value a block to one an element of a matrix `[..., N, K]` (or `[K]`) of `shape`; whole rows, whole columns
    and (1, ...) blocks stay broadcastable."""
    rows, columns = block
    if rows > 1 and len(shape) > 1:
        values = values.repeat_interleave(rows, -2)[..., : shape[-2], :]
    return values if columns == 0 else values.repeat_interleave(columns, -1)[..., : shape[-1]]


def narrow(w: Tensor) -> Tensor:
    """`w` in the narrowest of bfloat16, float16 and float32 that holds its values.

    Some tools compute scales in the checkpoint's dtype; this finds it again for a tensor that was read as float32.
    """
    if w.dtype in (torch.bfloat16, torch.float16):
        return w
    w = w.float()
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(w.to(dtype).float(), w):
            return w.to(dtype)
    return w
