"""CUDA makes a quotient by a number a product by its reciprocal. The reference's bits must not depend on that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from workbench.kernels import mx, nvfp4, reference, scaled
from workbench.kernels.tables import MXFP4_RULES, ScaleRule

_DIVISIONS = {Tensor.__truediv__, Tensor.div, Tensor.true_divide, torch.div, torch.true_divide, Tensor.__itruediv__}


class AsOnCuda(TorchFunctionMode):
    """x / number as CUDA computes it: x * (1 / number), both in float32 for narrower x."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DIVISIONS and isinstance(args[0], Tensor) and isinstance(args[1], (int, float)):
            x = args[0]
            wide = x.double() if x.dtype == torch.float64 else x.float()
            return (wide * torch.tensor(1.0 / args[1], dtype=wide.dtype)).to(x.dtype)
        return func(*args, **(kwargs or {}))


def values(dtype: torch.dtype) -> Tensor:
    w = torch.randn(512, 128, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 512)[:, None]
    return w.to(dtype)


def test_the_mode_changes_what_a_plain_quotient_gives() -> None:
    x = torch.rand(4096, generator=torch.Generator().manual_seed(0))
    with AsOnCuda():
        found, kept = x / 2688.0, reference.exact_quotient(x, 2688.0)
    assert not torch.equal(found, x / 2688.0)
    assert torch.equal(kept, x / 2688.0)


CASES: dict[str, Any] = {
    **{f"nvfp4 {rule}": lambda w, rule=rule: nvfp4.quantize(w, rule) for rule in nvfp4.RULES},
    **{f"mx {rule}": lambda w, rule=rule: mx.quantize(w, "e2m1", rule) for rule in mx.RULES},
    **{f"mxfp4 {rule}": lambda w, rule=rule: reference.mxfp4_quantize(w, rule) for rule in MXFP4_RULES},
    **{
        f"{element} {rule} {block}": lambda w, e=element, r=rule, b=block: scaled.quantize(w, e, r, b)
        for rule in scaled.RULES
        for element, block in (("e4m3", (1, 0)), ("e4m3", (128, 128)), ("int8", (1, 0)), ("int4", (1, 32)))
    },
    "nvfp4 activation": reference.nvfp4_qdq_activation,
    "mxfp4 activation": reference.mxfp4_qdq_activation,
    "fp8 activation": lambda w: scaled.qdq_activation(w, "e4m3"),
    "fp8 global": lambda w: scaled.fp8_global_scale(w.abs().amax(-1)),
    "nvfp4 globals": lambda w: reference.nvfp4_global_scale(w.abs().amax(-1)),
}


def parts(found: Any) -> list[Tensor]:
    return [t for t in (found if isinstance(found, tuple) else [found]) if isinstance(t, Tensor)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_how_a_device_divides_by_a_number(name: str, dtype: torch.dtype) -> None:
    w = values(dtype)
    try:
        expected = CASES[name](w)
    except ValueError as error:  # a rule that this element does not have
        pytest.skip(str(error))
    with AsOnCuda():
        found = CASES[name](w)
    for a, b in zip(parts(found), parts(expected), strict=True):
        assert torch.equal(a.float(), b.float()), name


def test_every_rule_was_tried() -> None:
    assert {ScaleRule.AMAX, ScaleRule.FOUR_OVER_SIX, ScaleRule.QUARK} <= set(nvfp4.RULES)
