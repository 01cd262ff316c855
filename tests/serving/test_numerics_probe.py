"""The probe against layers whose numerics are known: every rounding, every way in which weights can come out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from workbench.kernels import mx, reference, scaled

from workbench.formats import quantize
from workbench.serving.numerics_probe import (
    ExpertParts,
    Facts,
    Part,
    merge_facts,
    probe_columns,
    probe_expert,
    probe_linear,
)

K, N, DTYPE = 256, 96, torch.bfloat16
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CPU = torch.device("cpu")
STATIC = 0.0021

ROUNDINGS = {
    ("none", ""): lambda x: x,
    ("nvfp4", "per token"): reference.nvfp4_qdq_activation,
    ("nvfp4", "per tensor"): lambda x: reference.nvfp4_qdq_activation(
        x, reference.nvfp4_global_scale(x.float().abs().amax())
    ),
    ("nvfp4", "static"): lambda x: reference.nvfp4_qdq_activation(x, torch.tensor(STATIC)),
    ("mxfp4", "rule even"): lambda x: reference.mxfp4_qdq_activation(x, "even"),
    ("mxfp4", "rule floor"): lambda x: reference.mxfp4_qdq_activation(x, "floor"),
    ("mxfp8_e4m3", "rule floor"): lambda x: mx.qdq_activation(x, "e4m3", "floor"),
    ("fp8", "per token"): lambda x: scaled.qdq_activation(x, "e4m3"),
    ("fp8", "per group of 128"): lambda x: scaled.qdq_activation(x, "e4m3", group=128),
    ("fp8", "static"): lambda x: scaled.qdq_activation(x, "e4m3", torch.tensor(STATIC)),
    ("int8", "per token"): lambda x: scaled.qdq_activation(x, "int8"),
}


@pytest.fixture(scope="module")
def stored():
    """An NVFP4 matrix, and its exact decode in float32."""
    return quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(3)) * 0.05, "nvfp4")


def ask(run, weight, *, module="m.proj", scale=STATIC, name="nvfp4", dtype=DTYPE) -> Facts:
    part = Part(module=module, rows=weight.shape[0], weights={name: columns_of(weight)}, input_scale=scale)
    return probe_linear(run, k=K, dtype=dtype, device=CPU, parts=[part])


def columns_of(weight: torch.Tensor) -> torch.Tensor:
    return weight[:, probe_columns(weight.shape[1])]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wanted", ROUNDINGS, ids=" ".join)
def test_every_rounding_of_the_input_is_told_from_the_others(stored, wanted, dtype):
    weight = stored.dequantize()
    found = ask(lambda x: F.linear(ROUNDINGS[wanted](x).to(dtype), weight.to(dtype)), weight, dtype=dtype)
    assert (found.activation, found.scale) == wanted
    assert (found.weights, found.match) == ("nvfp4", "exact")
    assert found.residual < 0.005
    assert not found.differing


def test_without_a_checkpoint_the_rounding_alone_is_told(stored):
    weight = stored.dequantize().to(DTYPE)
    run = lambda x: F.linear(reference.nvfp4_qdq_activation(x), weight)  # noqa: E731
    found = probe_linear(run, k=K, dtype=DTYPE, device=CPU, parts=[])
    assert (found.activation, found.scale) == ("nvfp4", "per token")
    assert (found.weights, found.match) == ("", "")


def test_a_global_scale_in_the_models_dtype_is_rounded_not_exact(stored):
    # As a weight-only kernel does that multiplies the products of codes and block scales by a coarser global.
    unscaled = stored.dequantize() / stored.global_scale
    coarse = stored.global_scale * 1.003  # less than bfloat16's step of 2**-8
    found = ask(lambda x: (F.linear(x, unscaled.to(DTYPE)).float() * coarse).to(DTYPE), stored.dequantize())
    assert (found.weights, found.match, found.activation) == ("nvfp4", "rounded", "none")
    assert 0 < found.weight_error < 2**-8


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_global_scale_on_the_sum_is_exact(stored, dtype):
    # In float32 the two orders of three factors differ by a last bit, which no 16-bit output shows but at a tie.
    values = (stored.dequantize().double() / stored.global_scale.double()).float()  # E2M1 times E4M3: six bits
    run = lambda x: (x.float() @ values.T * stored.global_scale).to(dtype)  # noqa: E731
    found = ask(run, stored.dequantize(), dtype=dtype)
    assert (found.weights, found.match, found.activation) == ("nvfp4", "exact", "none")


def test_float32_that_is_off_by_more_than_a_last_bit_is_not_exact(stored):
    weight = stored.dequantize()
    for factor, match in ((1.0, "exact"), (1.0 + 2.0**-22, "scaled by 1")):
        found = ask(lambda x, w=weight * factor: F.linear(x, w), weight, dtype=torch.float32)
        assert found.match == match
    found = ask(lambda x: F.linear(x, weight.nextafter(2 * weight)), weight, dtype=torch.float32)
    assert found.match == "exact"


def test_another_matrixs_global_scale_shows_as_a_factor(stored):
    weight = stored.dequantize()
    found = ask(lambda x: F.linear(x, (weight * 1.25).to(DTYPE)), weight)
    assert found.match == "scaled by 1.25"


def test_weights_that_are_not_the_checkpoints_differ(stored):
    other = quantize(stored.dequantize(), "mxfp4").dequantize()
    found = ask(lambda x: F.linear(x, other.to(DTYPE)), stored.dequantize())
    assert found.match == "differs"
    assert 0.05 < found.weight_error < 0.2  # MXFP4's error is about a tenth
    both = Part(
        module="m", rows=N, weights={"nvfp4": columns_of(stored.dequantize()), "mxfp4 at load": columns_of(other)}
    )
    found = probe_linear(lambda x: F.linear(x, other.to(DTYPE)), k=K, dtype=DTYPE, device=CPU, parts=[both])
    assert (found.weights, found.match) == ("mxfp4 at load", "exact")


def test_a_single_wrong_column_is_seen(stored):
    weight = stored.dequantize()
    wrong = weight.clone()
    wrong[5, 3] += 0.01
    assert ask(lambda x: F.linear(x, wrong.to(DTYPE)), weight).match == "differs"


def test_fused_matrices_that_share_the_largest_input_scale_are_told(stored):
    weight = stored.dequantize()
    scales = {"m.q_proj": STATIC, "m.k_proj": STATIC * 1.9}
    parts = [
        Part(module=name, rows=N, weights={"nvfp4": columns_of(weight)}, input_scale=s) for name, s in scales.items()
    ]
    both = torch.cat([weight, weight]).to(DTYPE)

    def shared(x):
        return F.linear(reference.nvfp4_qdq_activation(x, torch.tensor(STATIC * 1.9)), both)

    def own(x):
        return torch.cat(
            [F.linear(reference.nvfp4_qdq_activation(x, torch.tensor(s)), weight.to(DTYPE)) for s in scales.values()],
            -1,
        )

    found = probe_linear(own, k=K, dtype=DTYPE, device=CPU, parts=parts)
    assert (found.activation, found.scale, found.differing) == ("nvfp4", "static", "")
    found = probe_linear(shared, k=K, dtype=DTYPE, device=CPU, parts=parts)
    assert (found.activation, found.scale) == ("nvfp4", "mixed")
    assert "q_proj: nvfp4 static, the largest of the fused matrices" in found.differing


def test_a_kernel_for_few_rows_that_skips_the_rounding_is_seen(stored):
    weight = stored.dequantize().to(DTYPE)

    def run(x):
        return F.linear(x if x.shape[0] <= 16 else reference.nvfp4_qdq_activation(x), weight)

    found = ask(run, stored.dequantize())
    assert found.differing == "none at 8 rows, nvfp4 per token at 72"


def test_an_unknown_rounding_is_unclear_not_guessed(stored):
    weight = stored.dequantize()
    found = ask(lambda x: F.linear((x.float() * 3).round().to(DTYPE) / 3, weight.to(DTYPE)), weight)
    assert found.activation == "unclear"


# ---- experts ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expert():
    """gate, up [I, H] and down [H, I] of one expert in NVFP4, gate and up with globals of their own."""
    generator = torch.Generator().manual_seed(11)
    inter, hidden = 128, 256
    gate = quantize(torch.randn(inter, hidden, generator=generator) * 0.05, "nvfp4")
    up = quantize(torch.randn(inter, hidden, generator=generator) * 0.08, "nvfp4")
    down = quantize(torch.randn(hidden, inter, generator=generator) * 0.05, "nvfp4")
    return gate, up, down


def run_expert(gate, up, down, rounding, dtype=DTYPE):
    def run(x, number):
        assert number == 3
        x = rounding(x)
        gate_y, up_y = (F.linear(x.to(dtype), w.to(dtype)) for w in (gate, up))
        hidden = F.silu(gate_y.float()).to(dtype) * up_y
        return F.linear(rounding(hidden).to(dtype), down.to(dtype))

    return run


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wanted", [("none", ""), ("nvfp4", "per token"), ("nvfp4", "static"), ("mxfp4", "rule even")])
def test_an_experts_rounding_is_told(expert, wanted, dtype):
    gate, up, down = (t.dequantize() for t in expert)
    parts = ExpertParts(
        gate_up={"nvfp4": (columns_of(gate), columns_of(up))},
        down={"nvfp4": down},
        gate_up_scale=STATIC,
        down_scale=STATIC,
    )
    found = probe_expert(
        run_expert(gate, up, down, ROUNDINGS[wanted], dtype), 3, k=gate.shape[1], dtype=dtype, device=CPU, parts=parts
    )
    assert (found.weights, found.match, found.activation) == ("nvfp4", "fits", wanted[0])
    assert wanted[1] in found.scale.split(" or ")


def test_an_up_projection_decoded_with_the_gates_global_is_told(expert):
    gate, up, down = (t.dequantize() for t in expert)
    ratio = float(expert[0].global_scale / expert[1].global_scale)
    named = "nvfp4, both with the gate's global"
    parts = ExpertParts(
        gate_up={
            "nvfp4": (columns_of(gate), columns_of(up)),
            "nvfp4, requantized": (columns_of(gate), columns_of(quantize(up, "mxfp4").dequantize())),
            named: (columns_of(gate), columns_of(up * ratio)),
        },
        down={"nvfp4": down},
    )
    run = run_expert(gate, up * ratio, down, lambda x: x)
    found = probe_expert(run, 3, k=gate.shape[1], dtype=DTYPE, device=CPU, parts=parts)
    assert found.weights == named


def stacked(seed: int):
    """An expert whose hidden values are few, so that one code of another rounding weighs much in its row."""
    generator = torch.Generator().manual_seed(seed)
    gate, up = (quantize(torch.randn(128, 256, generator=generator) * 0.05, "nvfp4").dequantize() for _ in range(2))
    return gate, up, quantize(torch.randn(256, 128, generator=generator) * 0.05, "nvfp4").dequantize()


@pytest.mark.parametrize("any_factor", [False, True], ids=["as it is", "scaled"])
def test_an_order_of_the_same_operations_is_no_other_computation(any_factor):
    # As kernels do that round to the model's dtype after SiLU and the product, not before: a last bit moves some hidden
    # value over a boundary, in a row or two of most experts.
    for seed in range(12):
        gate, up, down = stacked(seed)
        parts = ExpertParts(gate_up={"nvfp4": (columns_of(gate), columns_of(up))}, down={"nvfp4": down})

        def run(x, number, gate=gate, up=up, down=down):
            x = reference.nvfp4_qdq_activation(x).float()
            hidden = (F.silu(x @ gate.T) * (x @ up.T)).to(DTYPE)
            y = reference.nvfp4_qdq_activation(hidden).float() @ down.T
            return (2.5 * y if any_factor else y).to(DTYPE)

        found = probe_expert(run, 3, k=256, dtype=DTYPE, device=CPU, parts=parts, any_factor=any_factor)
        assert (found.match, found.activation) == ("fits", "nvfp4"), (seed, found)
        assert found.residual < 0.04, (seed, found)  # half of what fits; no other rounding comes below 0.11


@pytest.mark.parametrize("spoilt", ["dead", "another", "NaN"])
def test_more_than_two_odd_rows_of_an_expert_are_no_fit(spoilt):
    gate, up, down = stacked(0)
    parts = ExpertParts(gate_up={"nvfp4": (columns_of(gate), columns_of(up))}, down={"nvfp4": down})
    whole = run_expert(gate, up, down, lambda x: x)

    def ask_with(rows: list[int]) -> Facts:
        def run(x, number):
            y = whole(x, number)
            y[rows] = {"dead": 0.0, "NaN": float("nan"), "another": y.flip(1)[rows] * 1.3}[spoilt]
            return y

        return probe_expert(run, 3, k=256, dtype=DTYPE, device=CPU, parts=parts)

    assert ask_with([0, 5]).match == ("differs" if spoilt == "NaN" else "fits")
    for rows in ([0, 5, 7], list(range(8))):
        assert ask_with(rows).match == "differs"


def fact(activation: str, *, closest: str = "", weights: str = "int4_group") -> Facts:
    differing = f"closest: {closest}" if closest else ""
    return Facts(
        weights=weights, match="fits", weight_error=0.009, activation=activation, residual=0.009,
        differing=differing, closest=closest,
    )  # fmt: skip


def test_an_unclear_expert_is_what_the_clear_ones_are_where_that_fits_it_best():
    names = [f"expert {e}" for e in range(3)]
    found = merge_facts([fact("none"), fact("unclear", closest="none"), fact("none")], names)
    assert (found.activation, found.differing) == ("none", "")
    for odd in (
        fact("unclear", closest="int8"),  # the others' is not its best fit
        fact("unclear"),  # nothing fits
        fact("unclear", closest="none", weights="bf16"),  # of other weights
    ):
        assert merge_facts([fact("none"), odd, fact("none")], names).activation == "unclear"
    mixed = [fact("none"), fact("unclear", closest="none"), fact("int8")]
    assert merge_facts(mixed, names).activation == "unclear"  # the clear ones do not agree
    assert merge_facts([fact("unclear", closest="none")] * 3, names).activation == "unclear"  # none is clear


def test_an_expert_whose_fit_is_not_clear_names_the_closest(expert):
    gate, up, down = (t.dequantize() for t in expert)
    parts = ExpertParts(gate_up={"nvfp4": (columns_of(gate), columns_of(up))}, down={"nvfp4": down})
    noise = torch.Generator().manual_seed(0)

    def run(x, number):  # an output's noise of which INT8's rounding of the input is a small part
        y = run_expert(gate, up, down, lambda x: x)(x, number).float()
        return y * (1 + 0.03 * torch.randn(y.shape, generator=noise))

    found = probe_expert(run, 3, k=gate.shape[1], dtype=DTYPE, device=CPU, parts=parts)
    assert (found.match, found.activation) == ("fits", "unclear")
    assert found.closest in ("none", "int8")
    assert found.differing.startswith(f"closest: {found.closest}")
