"""Expected output noise of y = x W^T from second moments of x alone: exact, no rows needed.

    noise = expected_power(w_hat_nk - w_nk, moment)        # E |x dW^T|^2, summed over outputs

E |x dW^T|^2 = tr(dW M dW^T) with M = E[x x^T]: for any distribution of x, in particular for rows of any number. With
only M's diagonal it is what remains where inputs are uncorrelated and of mean zero. With M = identity (white inputs)
the ratio of signal and noise is the weights' own SQNR: an output averages nothing away. Rounded activations are not
covered: their error depends on more than second moments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.errors import CheckpointError
from workbench.formats.activations import Activations


def expected_power(w: Tensor, moment: Tensor) -> float:
    """tr(W M W^T): the expected sum over outputs of (x W^T) squared. w: `[N, K]`; moment: `[K]` (its diagonal) or
    `[K, K]`. Computed in float64."""
    values, m = w.double(), moment.double()
    if m.dim() == 1:
        return float((values.square() * m).sum())
    return float(((values @ m) * values).sum())


def second_moment(x: Tensor) -> Tensor:
    """E[x x^T] of rows `[M, K]`, float64 `[K, K]`."""
    rows = x.double()
    return rows.T @ rows / len(rows)


def moment_for(module: str, k: int, captured: Activations | None, x: Tensor) -> tuple[Tensor | None, str]:
    """The second moment of a module's input, and what it is: the whole one of all rows seen where the file has it, else
    that of the sampled rows, else the diagonal of all; without a file the identity. None where no row reached it.

    Sampled rows come before a diagonal: their moment is unbiased, and a diagonal leaves out how inputs move together
    (docs/analysis.md has both measured). Raises CheckpointError where the file's moment is of another width.
    """
    if captured is None:
        return torch.ones(k, dtype=torch.float64), "moments (white)"
    if module in captured and (stored := captured.second_moment(module)) is not None:
        if stored.shape[-1] != k:
            raise CheckpointError(
                f"{module} takes {k} inputs, but its captured second moment is {tuple(stored.shape)}",
                fix="capture the activations again with this checkpoint",
            )
        if stored.dim() == 2 or not len(x):
            return stored, "moments (diagonal)" if stored.dim() == 1 else "moments (full)"
    if not len(x):
        return None, "moments (full)"
    return second_moment(x), "moments (full)"
