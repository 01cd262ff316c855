"""The fast CPU kernels give the reference's bits: every byte, tie, subnormal and NaN, every dtype, shape and thread."""

from __future__ import annotations

import math
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor
from workbench.kernels import cpu, cpu_loops, reference
from workbench.kernels.tables import MXFP4_RULES

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float64: torch.int64}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RULES = [rule.value for rule in MXFP4_RULES]
GLOBALS = (None, torch.tensor(0.01), torch.tensor(2.0**-118), torch.tensor(3e38))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, any NaN being a NaN."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    if a.dtype not in BITS:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return bool(((a.view(BITS[a.dtype]) == b.view(BITS[b.dtype])) | (a.isnan() & b.isnan())).all())


def agree(function: str, *arguments: Any) -> bool:
    """Whether the fast function gives what the reference's does, part by part."""
    found, expected = getattr(cpu, function)(*arguments), getattr(reference, function)(*arguments)
    if isinstance(found, Tensor):
        return same_bits(found, expected)
    return all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def agree_on_quantization(x: Tensor) -> bool:
    """All four functions of weights and activations `x`, under every rule and several global scales."""
    return all(
        [agree(f"mxfp4_{what}", x, rule) for what in ("quantize", "qdq_activation") for rule in RULES]
        + [agree(f"nvfp4_{what}", x, g) for what in ("quantize", "qdq_activation") for g in GLOBALS]
    )


def every_value(dtype: torch.dtype) -> Tensor:
    """All 65536 values of a 16-bit dtype, NaN and infinity included, in rows of similar magnitude."""
    bits = torch.arange(1 << 15, dtype=torch.int32).view(-1, 1)
    return torch.cat((bits, bits + (1 << 15)), dim=1).to(torch.int16).view(dtype).view(-1, 64)


def random_bits(*shape: int, seed: int = 0) -> Tensor:
    """float32 numbers of every exponent, subnormals, infinity and NaN included."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, generator=generator).int().view(torch.float32)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("scale", ["nvfp4", "mxfp4"])
def test_every_byte_with_every_scale_decodes_as_the_reference(scale: str, dtype: torch.dtype) -> None:
    half = 8 if scale == "nvfp4" else 16
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    packed = every.expand(256, 256)  # a row: all bytes
    scales = every.view(-1, 1).expand(256, 256 // half).contiguous()  # a row: one scale
    if scale == "mxfp4":
        expected = reference.mxfp4_dequantize(packed, scales)
        assert same_bits(cpu.mxfp4_dequantize(packed, scales, dtype), expected.to(dtype))
        return
    scales = scales.view(torch.float8_e4m3fn)
    # Products down to float32's subnormals, around those of float16, and beyond both.
    for g in (1.0, 3.1e-4, 2.0**-22 / 3, 2.0**-118, 2.0**-140, 127.3, 1e38, -0.5, math.inf, math.nan):
        g = torch.tensor(g)
        assert same_bits(
            cpu.nvfp4_dequantize(packed, scales, g, dtype), reference.nvfp4_dequantize(packed, scales, g).to(dtype)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_is_quantized_as_by_the_reference(dtype: torch.dtype) -> None:
    values = every_value(dtype)
    assert agree_on_quantization(values)
    mixed = values.flatten()[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))].view(-1, 64)
    assert agree_on_quantization(mixed)


def test_float32_of_every_exponent_is_quantized_as_by_the_reference() -> None:
    assert agree_on_quantization(random_bits(1024, 64))
    x = random_bits(1024, 64, seed=1)
    exponents = torch.randint(0, 255, (1024, 1), generator=torch.Generator().manual_seed(2)) << 23
    near = ((x.view(torch.int32) & ~0x7F800000) | exponents.int()).view(torch.float32)  # a row: one exponent
    assert agree_on_quantization(near)


def test_maxima_around_each_rules_threshold_choose_the_references_exponent() -> None:
    exponents = torch.arange(-149, 128).double().exp2().view(-1, 1)
    significands = torch.tensor([1.0, 1.5, 1.75]).double() + torch.tensor([[-1], [0], [1]]) * 2.0**-23
    x = torch.zeros(277 * 9, 32)
    x[:, 7] = -(exponents * significands.flatten()).float().flatten()
    for rule in RULES:
        assert agree("mxfp4_quantize", x, rule)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_zero_blocks_and_minus_zero(dtype: torch.dtype) -> None:
    midpoints = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    row = torch.tensor([*midpoints, *(-m for m in midpoints), 0.0, -0.0, *[0.5, -0.5] * 7])
    x = torch.stack((row, row * 2.0**-9, row * 448, torch.zeros(32), -torch.zeros(32))).to(dtype)
    for g in (1.0, 2.0**-3, 0.1):
        assert agree("nvfp4_quantize", x, torch.tensor(g))
        assert agree("nvfp4_qdq_activation", x, torch.tensor(g))
    assert agree_on_quantization(x)
    codes, scales, _ = cpu.nvfp4_quantize(x[:1, :16], torch.tensor(1.0))
    assert scales.float().item() == 1.0
    assert codes.tolist() == [[0x20, 0x42, 0x64, 0x76, 0xA8, 0xCA, 0xEC, 0xFE]]


@given(
    arrays(np.uint32, st.tuples(st.integers(0, 3), st.sampled_from([32, 64, 96]))),
    st.sampled_from(RULES),
    st.sampled_from(DTYPES),
)
@settings(deadline=None, max_examples=100)
def test_any_bits_are_handled_alike_on_both_paths(bits: Any, rule: str, dtype: torch.dtype) -> None:
    x = torch.from_numpy(bits).view(torch.float32).to(dtype)
    per_row = torch.full((x.shape[0], 1), 0.37)
    assert agree("mxfp4_quantize", x, rule)
    assert agree("mxfp4_qdq_activation", x, rule)
    for g in (None, torch.tensor(0.01), per_row):
        assert agree("nvfp4_quantize", x, g)
        assert agree("nvfp4_qdq_activation", x, g)


# ---- shapes ----------------------------------------------------------------------------------------------------------

# One block, one row, no row, stacks, rows longer than a tile, tensors longer than a thread's part.
SHAPES = [(32,), (0, 64), (1, 64), (5, 7, 96), (3, 2080), (300, 1024), (2, 140_032), (1, 300_000)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_quantized_and_decoded_as_by_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    w = (torch.randn(shape, generator=generator) * torch.randn(shape[:-1], generator=generator).unsqueeze(-1)).to(dtype)
    assert agree("mxfp4_quantize", w)
    assert agree("nvfp4_quantize", w)
    packed, scale_bytes = reference.mxfp4_quantize(w)
    expected = reference.mxfp4_dequantize(packed, scale_bytes).to(dtype)
    assert same_bits(cpu.mxfp4_dequantize(packed, scale_bytes, dtype), expected)
    blocks = (*shape[:-1], shape[-1] // 16)
    for globals_ in ((), (1,) * len(shape), (*shape[:-1], 1), blocks):  # a tensor's, a fused shard's, a block's
        g = torch.rand(globals_, generator=generator) / 100 + 1e-4
        assert agree("nvfp4_quantize", w, g) if globals_ != blocks else True
        packed, scales, _ = reference.nvfp4_quantize(w)
        expected = reference.nvfp4_dequantize(packed, scales, g).to(dtype)
        assert same_bits(cpu.nvfp4_dequantize(packed, scales, g, dtype), expected)
    if w.dim() == 2:
        for g in (None, torch.rand(shape[0], 1, generator=generator)):
            assert agree("nvfp4_qdq_activation", w, g)


def test_tensors_that_are_not_contiguous() -> None:
    w = torch.randn(128, 192, generator=torch.Generator().manual_seed(0))
    for view in (w.t(), w[:, 64:128], w[::3], w.bfloat16()[:, ::2][:, :64], w[0].expand(5, -1), w.requires_grad_()):
        assert agree("nvfp4_quantize", view)
        assert agree("mxfp4_quantize", view)
        assert agree("nvfp4_qdq_activation", view)
    packed, scales, g = reference.nvfp4_quantize(w.detach())
    rows = slice(1, None, 2)
    expected = reference.nvfp4_dequantize(packed[rows], scales[rows], g)
    assert same_bits(cpu.nvfp4_dequantize(packed[rows], scales[rows], g), expected)


def test_a_partial_block_or_scales_of_another_shape_are_refused() -> None:
    for function, k in ((cpu.nvfp4_quantize, 24), (cpu.mxfp4_quantize, 48), (cpu.nvfp4_qdq_activation, 24)):
        with pytest.raises(ValueError, match="not a multiple of the block"):
            function(torch.ones(2, k))
    codes = torch.zeros(4, 32, dtype=torch.uint8)
    for scales in (torch.zeros(4, 1, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="do not fit"):
            cpu.mxfp4_dequantize(codes, scales)
    with pytest.raises(ValueError, match="floor, even, rceil, ceil"):
        cpu.mxfp4_quantize(torch.ones(1, 32), "amax")


def test_elements_beyond_2_to_the_31_are_reached() -> None:
    """Memory that is never touched costs none: only the last blocks of 4 GiB of bfloat16 are written and read."""
    blocks, last = 2**31 // 32 + 3, 3
    values = torch.randn(last, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = np.empty(blocks * 32, np.uint16)
    x[-last * 32 :] = values.view(torch.uint16).flatten().numpy()
    codes, scale_bytes = np.empty(blocks * 16, np.uint8), np.empty(blocks, np.uint8)
    cpu_loops.mxfp4_encode(x, 0x200000, codes, scale_bytes, blocks - last, blocks)
    expected_codes, expected_bytes = reference.mxfp4_quantize(values)
    assert codes[-last * 16 :].tolist() == expected_codes.flatten().tolist()
    assert scale_bytes[-last:].tolist() == expected_bytes.flatten().tolist()


# ---- threads, memory, start ------------------------------------------------------------------------------------------


@pytest.fixture
def threads() -> Any:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_the_bits_do_not_depend_on_the_number_of_threads(threads: Callable[[int], None]) -> None:
    # Subnormal numbers throughout: a thread that flushed them would give zeros.
    w = torch.randn(1200, 512, generator=torch.Generator().manual_seed(0)) * 2.0**-130
    tiny = torch.tensor(2.0**-140)
    for n in (1, 2, 5):
        threads(n)
        assert agree("mxfp4_quantize", w)
        assert agree("mxfp4_qdq_activation", w)
        packed, scales, _ = reference.nvfp4_quantize(w * 2.0**120)
        expected = reference.nvfp4_dequantize(packed, scales, tiny)
        assert expected.count_nonzero() > 0
        assert expected.abs().max() < torch.finfo(torch.float32).tiny
        assert same_bits(cpu.nvfp4_dequantize(packed, scales, tiny), expected)


def test_no_more_threads_run_than_torch_has(threads: Callable[[int], None]) -> None:
    def used(n: int) -> int:
        threads(n)
        seen = set()

        def loop(start: int, stop: int) -> None:
            seen.add(_thread())
            time.sleep(0.002)

        cpu._in_threads(loop, 40, cpu._PART)
        return len(seen)

    assert used(1) == 1
    assert 1 <= used(2) <= 2


def test_every_part_is_taken_once() -> None:
    for count, values in ((0, 16), (1, 16), (cpu._PART // 16 + 1, 16), (2**33 // 16 + 5, 16), (7, 10**9), (3, 0)):
        taken: list[tuple[int, int]] = []
        cpu._in_threads(lambda start, stop, taken=taken: taken.append((start, stop)), count, values)
        taken.sort()
        assert [start for start, _ in taken] == [0, *(stop for _, stop in taken[:-1])][: len(taken)]
        assert (taken[-1][1] if taken else 0) == count


def test_several_threads_may_call_at_once(threads: Callable[[int], None]) -> None:
    threads(2)
    w = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    expected = reference.nvfp4_quantize(w)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: cpu.nvfp4_quantize(w), range(16)):
            assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def test_a_forked_process_has_its_own_threads(threads: Callable[[int], None]) -> None:
    threads(2)
    w = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    expected = cpu.mxfp4_quantize(w)[0].sum().item()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_sum, args=(w, sender))
    child.start()
    assert receiver.poll(20)
    assert receiver.recv() == expected
    child.join(20)


def _send_sum(w: Tensor, sender: Any) -> None:
    codes = torch.from_numpy(cpu.mxfp4_quantize(w)[0].numpy())
    sender.send(int(codes.numpy().sum(dtype=np.int64)))  # torch's own threads do not survive a fork; numpy has none


def _thread() -> int:
    import threading

    return threading.get_ident()


def test_after_prepare_serving_compiles_nothing() -> None:
    cpu.prepare(torch.float16)
    loops = (cpu_loops.decode, cpu_loops.nvfp4_round, cpu_loops.mxfp4_encode)
    before = [len(loop.signatures) for loop in loops]
    x = torch.ones(3, 64, dtype=torch.float16)
    parts = reference.nvfp4_quantize(x)
    for g in (torch.tensor(0.5), torch.full((3, 1), 0.5)):
        cpu.nvfp4_qdq_activation(x, g)
        cpu.nvfp4_dequantize(parts[0], parts[1], g, torch.float16)
    cpu.mxfp4_dequantize(*reference.mxfp4_quantize(x), torch.float16)
    cpu.mxfp4_qdq_activation(x, "ceil")
    assert [len(loop.signatures) for loop in loops] == before


SCRIPT = """
import resource, sys
import torch
from workbench.kernels import cpu
assert "numba" not in sys.modules, "numba is imported before it is needed"
w = torch.full((4096, 8192), 0.5, dtype=torch.bfloat16)
cpu.nvfp4_quantize(w[:64]), cpu.mxfp4_quantize(w[:64])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
codes = cpu.nvfp4_quantize(w)[0], cpu.mxfp4_quantize(w)[0]
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
from workbench.kernels import cpu_loops as loops
for loop in (loops.nvfp4_encode, loops.mxfp4_encode, loops.largest_magnitude):
    assert sum(loop.stats.cache_hits.values()) == 1, "compiled again, though an earlier process did"
    assert not loop.stats.cache_misses
"""


def test_a_process_starts_without_numba_compiles_nothing_twice_and_copies_no_weight() -> None:
    w = torch.ones(1, 32, dtype=torch.bfloat16)
    cpu.nvfp4_quantize(w)
    cpu.mxfp4_quantize(w)  # compiled and cached, by this process or an earlier one
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # 64 MiB of bfloat16; the results are 16 + 2 and 16 + 1 MiB, a float32 copy would be 128.
    assert int(done.stdout) < 64


@pytest.mark.parametrize(
    ("format", "what"), [*product(("nvfp4", "mxfp4"), ("quantize", "dequantize", "qdq_activation"))]
)
def test_the_fast_path_is_at_least_three_times_as_fast_as_the_reference(format: str, what: str) -> None:
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    arguments = (x,) if what != "dequantize" else getattr(reference, f"{format}_quantize")(x)
    fast, slow = (getattr(kernels, f"{format}_{what}") for kernels in (cpu, reference))
    fast(*arguments)

    def seconds(function: Callable[..., object]) -> float:
        start = time.perf_counter()
        function(*arguments)
        return time.perf_counter() - start

    # The best of several on both sides: what a busy machine takes from one run says nothing about the code.
    rounds = [(seconds(slow), seconds(fast), seconds(fast)) for _ in range(9)]
    ratio = min(r[0] for r in rounds) / min(min(r[1:]) for r in rounds)
    assert ratio >= 3, f"the reference takes {ratio:.1f} times as long"
