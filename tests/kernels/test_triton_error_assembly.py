"""What only an NVIDIA card runs of the error pass, run here instruction by instruction, over all that it takes."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from workbench.kernels import reference, tables

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton_interpreter import interpreted
from workbench.kernels import triton_details_pairs as details
from workbench.kernels import triton_errors_pairs as pairs

WORD = 0xFFFFFFFF


def assembly_of(function: Any) -> list[str]:
    """The texts of a device function's inline assembly, in order."""
    return re.findall(r'"""(\{.*?\})"""', inspect.getsource(function.fn), flags=re.DOTALL)


def halves(word: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The two 16-bit numbers of words, float64."""
    return [(word >> shift & 0xFFFF).to(torch.int32).short().view(dtype).double() for shift in (0, 16)]


def packed(parts: list[Tensor]) -> Tensor:
    """Two float64 numbers rounded to bfloat16, as words."""
    bits = [part.to(torch.float32) for part in parts]
    for part, exact in zip(bits, parts, strict=True):  # float32 on the way must not round a tie away
        lost = exact != part.double()
        part.view(torch.int32)[lost] |= 1
    low, high = ((part.bfloat16().view(torch.int16).long()) & 0xFFFF for part in bits)
    return low | high << 16


def larger_or_smaller(a: Tensor, b: Tensor, *, larger: bool) -> Tensor:
    """max.xorsign.abs and min.NaN.xorsign.abs: of the magnitudes, with the product's sign. max prefers a number."""
    found = torch.zeros_like(a)
    for shift in (0, 16):
        p, q = (t >> shift & 0xFFFF for t in (a, b))
        sign, p, q = (p ^ q) & 0x8000, p & 0x7FFF, q & 0x7FFF
        most = torch.maximum(p, q) if larger else torch.minimum(p, q)
        if larger:
            most = torch.where(p > 0x7F80, q, torch.where(q > 0x7F80, p, most))
        else:
            most = torch.where((p > 0x7F80) | (q > 0x7F80), 0x7FFF, most)
        found |= (most | sign) << shift
    return found


def permute(a: Tensor, b: Tensor, selector: Tensor) -> Tensor:
    both, found = a | b << 32, torch.zeros_like(a | selector)
    for i in range(4):
        nibble = selector >> (4 * i) & 15
        assert bool((nibble < 8).all()), "sign replication is not emulated"
        found |= (both >> (8 * nibble) & 255) << (8 * i)
    return found


def run(text: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Registers after `text`: words as int64, and float32."""
    values = dict(inputs)

    def value(name: str) -> Tensor:
        if name.startswith("0f"):
            return torch.tensor(int(name[2:], 16)).int().view(torch.float32)
        return torch.tensor(int(name, 0) & WORD) if name[0].isdigit() else values[name]

    operations = {
        "and.b32": lambda a, b: a & b,
        "shl.b32": lambda a, b: (a << b) & WORD,
        "shr.u32": lambda a, b: a >> b,
        "prmt.b32": permute,
        "abs.f32": torch.abs,
        "set.leu.f32.f32": lambda a, b: (~(a > b)).float(),
        "set.eq.f32.f32": lambda a, b: (a == b).float(),
        "mul.rn.f32": torch.mul,
        "max.f32": torch.fmax,
        "mul.lo.u32": lambda a, b: (a * b) & WORD,
        "cvt.f32.f16": lambda a: halves(a, torch.float16)[0].float(),
        "max.xorsign.abs.bf16x2": lambda a, b: larger_or_smaller(a, b, larger=True),
        "min.NaN.xorsign.abs.bf16x2": lambda a, b: larger_or_smaller(a, b, larger=False),
        "fma.rn.bf16x2": lambda *t: packed(
            [a * b + c for a, b, c in zip(*(halves(x, torch.bfloat16) for x in t), strict=True)]
        ),
        "sub.rn.bf16x2": lambda *t: packed(
            [a - b for a, b in zip(*(halves(x, torch.bfloat16) for x in t), strict=True)]
        ),
    }
    for line in map(str.strip, text.strip("{}\n ").splitlines()):
        if line.startswith(".reg"):
            continue
        name, arguments = line.rstrip(";").split(" ", 1)
        if arguments.startswith("{"):
            low, high, word = re.findall(r"\w+", arguments)
            values[low], values[high] = values[word] & 0xFFFF, values[word] >> 16
            continue
        target, *sources = arguments.split(", ")
        values[target] = operations[name](*map(value, sources))
    return values


def test_codes_are_looked_up_with_their_signs() -> None:
    generator = torch.Generator().manual_seed(0)
    alike = torch.arange(16) * 0x11111111  # every code at every place
    words = torch.cat((alike, torch.randint(0, 1 << 32, (4096,), generator=generator)))
    table = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12])
    other = table[torch.randint(0, 8, (len(words), 8), generator=generator)]
    shifts = 8 * torch.arange(4)
    low, high = (other[:, :4] << shifts).sum(1), (other[:, 4:] << shifts).sum(1)
    (text,) = assembly_of(pairs.eight_pair_values)
    out = run(text, {"$16": words, "$17": low, "$18": high})
    codes = words[:, None] >> (4 * torch.arange(8)) & 15
    sign = 1 - 2 * (codes >> 3)
    assert torch.equal(
        torch.stack([out[f"${i}"] for i in range(8)], 1).double() * 2.0**24, (sign * table[codes & 7]).double()
    )
    expected = (sign * other.gather(1, codes & 7)).double()
    assert torch.equal(torch.stack([out[f"${8 + i}"] for i in range(8)], 1).double() * 2.0**24, expected)
    assert bool((out["$0"][codes[:, 0] == 8].view(torch.int32) < 0).all()), "-0 keeps its sign"


@pytest.mark.parametrize("rule", ["floor", "even"])
def test_direct_errors_are_the_references_for_every_weight_and_scale(rule: str) -> None:
    floor, other = assembly_of(pairs.direct_errors)
    text = floor if rule == "floor" else other
    limit = 8 if rule == "floor" else 7  # the largest quotients lie below
    every = torch.arange(1 << 16)
    value = every.to(torch.int32).short().view(torch.bfloat16).double()
    for byte in range(1, 247):
        step = 2.0 ** (byte - 127)
        x = every[value.abs() < limit * step]
        x = torch.stack((x, x.flip(0)))  # each weight in either half
        scale = torch.tensor(((byte << 7) | 0x40) * 0x10001)
        names = {
            "$2": x[0] | x[1] << 16,
            "$3": scale,
            "$4": torch.tensor(-0x3D7F3D80 & WORD),
            "$5": torch.tensor(0x42804280),
        }
        names |= {"$6": torch.tensor(1 << 16), "$7": scale + 0x01000100}
        out = run(text, names)
        for half, found in enumerate((out["$0"], out["$1"])):
            w = value[x[half]]
            expected = reference.e2m1_values(reference.e2m1_round((w / step).float())).double() * step - w
            error = torch.where(found >= 1 << 31, found - (1 << 32), found).int().view(torch.float32).double()
            assert torch.equal(error, expected), (byte, half)


def test_a_weight_that_is_not_finite_errs_by_nan() -> None:
    for text in assembly_of(pairs.direct_errors):
        x = torch.tensor([0x7F807FC0, 0xFF80FFC0, 0x7F81FF80])
        for scale in (0x00C000C0, 0x7EC07EC0):
            names = {
                "$2": x,
                "$3": torch.tensor(scale),
                "$4": torch.tensor(-0x3D7F3D80 & WORD),
                "$5": torch.tensor(0x42804280),
            }
            out = run(text, names | {"$6": torch.tensor(1 << 16), "$7": torch.tensor(scale + 0x01000100)})
            for found in (out["$0"], out["$1"]):
                assert bool(((found & 0x7FFFFFFF) > 0x7F800000).all())


@triton.jit
def _direct_scales(most_ptr, found_ptr, byte_ptr, RULE: tl.constexpr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    most = tl.load(most_ptr + at)
    tl.store(found_ptr + at, pairs.direct_scale(most, RULE, True))
    tl.store(byte_ptr + at, pairs.direct_scale(most, RULE, False))


@pytest.mark.parametrize("rule", [rule.value for rule in tables.MXFP4_RULES])
@interpreted
def test_direct_scales_are_those_of_the_rule_for_every_finite_maximum(rule: str) -> None:
    magnitude = torch.arange(1 << 15, dtype=torch.int32)
    smaller = magnitude >> 3
    for most in (magnitude | smaller << 16, smaller | magnitude << 16):
        found, byte = torch.empty_like(most), torch.empty_like(most)
        _direct_scales[(1,)](most, found, byte, RULE=rule, COUNT=1 << 15)
        finite = (magnitude < 0x7F80) & (byte < 252)  # beyond, no sum of squares is finite
        expected = (byte.clamp(min=1) << 7 | 0x40) * 0x10001
        assert torch.equal(found[finite], expected[finite])


def test_an_elements_attribution_is_computed_as_elsewhere() -> None:
    """The factors and the quotient: magnitudes around the limit, zeros of both signs, infinity and NaN."""
    values = torch.tensor([0.0, -0.0, 1e-45, -0.3, 1.49, 1.5, -1.5, 1.51, 6.0, -6.1, 1e30, float("inf"), float("nan")])
    x, limit, inverse = (
        t.reshape(-1) for t in torch.meshgrid(values, values[values >= 0][:-1], values[6:9].abs(), indexing="ij")
    )
    (text,) = assembly_of(details.attributed)
    out = run(text, {"$3": x, "$4": limit, "$5": inverse})
    assert torch.equal(out["$0"], (~(x.abs() > limit)).float())
    quotient = x.abs() * inverse
    assert torch.equal(out["$1"].nan_to_num(7.0), quotient.nan_to_num(7.0))
    assert torch.equal(out["$2"], torch.where(quotient > 1.5, quotient, 1.5))
    (line,) = re.findall(r'"(set\.eq[^"]*)"', inspect.getsource(details.is_zero.fn))
    assert torch.equal(run(line, {"$1": values})["$0"], (values == 0).float())


def test_the_two_multiply_adds_err_as_rounding_to_e2m1_does() -> None:
    """`attributed`'s rounding of quotients up to 7, in float32, which `tl.fma` is."""
    every = torch.arange(0, 0x40E00000, 997, dtype=torch.int32).view(torch.float32)
    midpoints = torch.tensor(tables.E2M1_MIDPOINTS).view(torch.int32)
    q = torch.cat((every, *((midpoints + step).view(torch.float32) for step in range(-3, 4)))).double()
    m = q.clamp(min=1.5)
    h = (q - m * 2.0**22).float().double()  # the products and sums are exact in float64
    error = (h + m * 2.0**22).float().double() - q
    expected = reference.e2m1_values(reference.e2m1_round(q.float())).double() - q
    assert torch.equal(error, expected)
