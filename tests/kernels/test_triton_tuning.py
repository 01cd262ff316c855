"""Plans of the GEMM kernels: the fastest is kept and read again, nothing that is damaged or fails is, and every plan of
the portable kernels gives the reference's product."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from workbench.kernels import reference

pytest.importorskip("triton", minversion="3.9", reason="older interpreters round a fused multiply-add twice")
from triton_interpreter import interpreted
from workbench.kernels import triton_configs, triton_routes, triton_tuning
from workbench.kernels.triton_tuning import Card, Entry, Plan, Store, Tuner

A100 = SimpleNamespace(name="NVIDIA A100", major=8, minor=0, multi_processor_count=108)
H200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
MI300 = SimpleNamespace(name="AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=304)
CARD = Card.of(A100, "3.6.0")
PLANS = [Plan("portable"), Plan("portable", (32, 128, 4, 2, 0)), Plan("decode")]


class Bench:
    """Runs plans, and is the timer of those it ran: us by plan; a plan without one fails."""

    def __init__(self, us: dict[Plan, float], wrong: Plan | None = None) -> None:
        self.us, self.wrong, self.timed = us, wrong, list[Plan]()
        self.last = PLANS[0]

    def run(self, plan: Plan) -> Tensor:
        if plan not in self.us:
            raise RuntimeError("out of resource: shared memory")
        self.last = plan
        return torch.full((4,), -1.0 if plan == self.wrong else 1.0)

    def timer(self, call: Callable[[], object]) -> float:
        call()
        self.timed.append(self.last)
        return self.us[self.last] / 1e6


def tuned(path: Path, bench: Bench, key: str = "shape", card: Card = CARD, may: bool = True) -> tuple[Tuner, Plan]:
    tuner = Tuner(Store(path, card), bench.timer, lambda: may)
    return tuner, tuner.plan(key, lambda: list(PLANS), bench.run)


def test_the_fastest_is_kept_and_read_by_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "plans.json"
    bench = Bench({PLANS[0]: 30.0, PLANS[1]: 20.0, PLANS[2]: 25.0})
    tuner, plan = tuned(path, bench)
    assert plan == PLANS[1]
    assert bench.timed == PLANS
    assert tuner.plan("shape", lambda: list(PLANS), bench.run) == PLANS[1]
    assert (len(bench.timed), tuner.tuned) == (3, 1)  # not measured again
    assert tuner.store.entries["shape"] == Entry(PLANS[1], 20.0, 30.0)
    again = Bench({})
    tuner, plan = tuned(path, again)
    assert (plan, again.timed, tuner.tuned) == (PLANS[1], [], 0)
    assert tuner.store.entries["shape"] == Entry(PLANS[1], 20.0, 30.0)
    assert [p.name for p in path.parent.iterdir()] == ["plans.json"]  # no temporary file is left


def test_of_equals_the_default_stays(tmp_path: Path) -> None:
    assert tuned(tmp_path / "p", Bench(dict.fromkeys(PLANS, 20.0)))[1] == PLANS[0]


def test_keys_and_cards_are_measured_apart_and_share_the_file(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    other = Card.of(A100, "3.7.1")
    fast = {PLANS[0]: 3.0, PLANS[1]: 2.0, PLANS[2]: 1.0}
    first = Tuner(Store(path, CARD), Bench({}).timer, lambda: True)  # opened before the others wrote
    assert tuned(path, Bench(fast), card=other)[1] == PLANS[2]
    assert tuned(path, Bench({PLANS[0]: 1.0, PLANS[1]: 2.0, PLANS[2]: 3.0}))[1] == PLANS[0]
    assert tuned(path, Bench({**fast, PLANS[1]: 0.5}), key="another")[1] == PLANS[1]
    first.store.add("third", Entry(PLANS[0], 1.0, 1.0))
    cards = json.loads(path.read_text())["cards"]
    assert {card: sorted(plans) for card, plans in cards.items()} == {
        other.key: ["shape"],
        CARD.key: ["another", "shape", "third"],
    }


def test_cards_are_told_apart_by_name_architecture_size_and_triton() -> None:
    half = SimpleNamespace(**{**vars(A100), "multi_processor_count": 54})
    newer = SimpleNamespace(**{**vars(A100), "minor": 6})
    cards = [
        *(Card.of(p, "3.6.0") for p in (A100, H200, half, newer)),
        Card.of(A100, "3.7.0"),
        Card.of(MI300, "3.6.0", hip=True),
    ]
    assert len({card.key for card in cards}) == len(cards)
    assert cards[0].key == Card.of(A100, "3.6.2").key
    assert (cards[0].architecture, cards[-1].architecture) == ("sm_80", "gfx942")


def test_keys_tell_shapes_formats_and_dtypes_apart() -> None:
    key = triton_routes.linear_key
    shape: tuple[Any, ...] = (8192, 4096, 16, "nvfp4", "none", torch.bfloat16)
    others: list[tuple[Any, ...]] = [
        (4096, 8192, *shape[2:]),
        (*shape[:2], 32, *shape[3:]),
        (*shape[:3], "mxfp4", *shape[4:]),
        (*shape[:4], "nvfp4", torch.bfloat16),
        (*shape[:5], torch.float16),
    ]
    assert len({key(*s) for s in (shape, *others)}) == 6
    codes = torch.empty(8, 64, 32, dtype=torch.uint8)
    experts = {
        triton_routes.experts_key(c, 64, a, size, 1, "nvfp4", torch.bfloat16)
        for c in (codes, codes[:4])
        for a in (8, 100)
        for size in (0, 16)
    }
    assert len(experts) == 8
    assert [triton_routes.bucket(m) for m in (1, 8, 9, 64, 65, 512, 513)] == [8, 8, 16, 64, 128, 512, None]


def test_what_fails_or_computes_something_else_is_left_out(tmp_path: Path) -> None:
    bench = Bench({PLANS[0]: 30.0, PLANS[2]: 10.0}, wrong=PLANS[2])
    tuner, plan = tuned(tmp_path / "plans.json", bench)
    assert (plan, bench.timed) == (PLANS[0], [PLANS[0]])
    bench = Bench({PLANS[1]: 30.0})  # the default itself cannot run
    assert tuned(tmp_path / "other.json", bench)[1] == PLANS[1]
    tuner, plan = tuned(tmp_path / "none.json", Bench({}))
    assert plan == PLANS[0]
    assert not (tmp_path / "none.json").exists()
    assert not tuner.store.entries


def test_results_agree_up_to_rounding() -> None:
    y = torch.tensor([1.0, -3.0, 1e-3, torch.inf, torch.nan])
    assert triton_tuning.agree(y * (1 + 2.0**-8), y)
    for wrong in ([1.1, -3.0, 0, 0, 0], [torch.nan, -3.0, 0, 0, 0], [1.0, 3.0, 0, 0, 0]):
        assert not triton_tuning.agree(torch.tensor(wrong), y)
    assert triton_tuning.agree(torch.empty(0, 4), torch.empty(0, 4))


def test_measuring_ends_when_its_time_is_over(tmp_path: Path) -> None:
    bench = Bench({PLANS[0]: 30.0, PLANS[1]: 20.0, PLANS[2]: 10.0})
    clock = iter([0.0, 0.0, 2.0, 2.0, 2.0])  # start, before and after the first timing, which takes two seconds
    tuner = Tuner(Store(tmp_path / "p", CARD), bench.timer, lambda: True, clock=lambda: next(clock))
    assert tuner.plan("shape", lambda: list(PLANS), bench.run) == PLANS[0]
    assert bench.timed == PLANS[:1]


def test_nothing_is_measured_in_a_capture_but_known_plans_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    fast = {PLANS[0]: 3.0, PLANS[1]: 2.0, PLANS[2]: 1.0}
    bench = Bench(fast)
    assert tuned(path, bench, may=False)[1] == PLANS[0]
    assert not bench.timed
    assert not path.exists()
    tuned(path, Bench(fast))
    assert tuned(path, bench, may=False)[1] == PLANS[2]
    assert not triton_tuning.may_tune(capturing=lambda: True)
    with triton_tuning.at_load():
        assert not triton_tuning.may_tune(capturing=lambda: True)
        assert triton_tuning.may_tune(capturing=lambda: False, ranks=lambda: 2)
    assert not triton_tuning.may_tune(capturing=lambda: False, ranks=lambda: 2)
    assert triton_tuning.may_tune(capturing=lambda: False, ranks=lambda: 1)


def test_no_tuner_on_a_cpu_nor_while_tracing() -> None:
    assert triton_tuning.tuner(torch.device("cpu")) is None

    @torch.compile(backend="eager", fullgraph=True)
    def traced(x: Tensor) -> Tensor:
        return x + (1 if triton_tuning.tuner(torch.device("cuda", 0)) is None else 2)

    assert traced(torch.zeros(1)).item() == 1


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"cards": {}}', '{"format": "workbench-kernel-plans-1", "cards": 3}', "\x00\xff"],
)
def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "plans.json"
    path.write_bytes(content.encode("latin-1"))
    tuner, plan = tuned(path, Bench({PLANS[0]: 3.0, PLANS[1]: 2.0, PLANS[2]: 1.0}))
    assert plan == PLANS[2]
    assert tuner.plan("shape", lambda: list(PLANS), Bench({}).run) == PLANS[2]  # in memory
    assert path.read_bytes() == content.encode("latin-1")
    assert len(caplog.records) == 1
    assert "WORKBENCH_TUNE_CACHE" in caplog.text


@pytest.mark.parametrize(
    "value", [3, ["portable"], ["portable", ["x"], 1, 1], ["portable", [1, 2], 1, 1], ["x", [], 1, 1]]
)
def test_a_damaged_plan_or_one_that_is_no_candidate_is_measured_anew(tmp_path: Path, value: object) -> None:
    path = tmp_path / "plans.json"
    tuned(path, Bench(dict.fromkeys(PLANS, 1.0)), key="sound")
    content = json.loads(path.read_text())
    content["cards"][CARD.key]["shape"] = value
    path.write_text(json.dumps(content))
    tuner, plan = tuned(path, Bench({PLANS[0]: 3.0, PLANS[1]: 2.0, PLANS[2]: 1.0}))
    assert (plan, tuner.tuned) == (PLANS[2], 1)
    assert json.loads(path.read_text())["cards"][CARD.key] == {
        "sound": ["portable", [], 1.0, 1.0],
        "shape": ["decode", [], 1.0, 3.0],
    }


def test_a_folder_that_cannot_be_written_leaves_plans_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    tuner, plan = tuned(tmp_path / "file" / "plans.json", Bench({PLANS[0]: 3.0, PLANS[1]: 2.0, PLANS[2]: 1.0}))
    assert plan == PLANS[2]
    assert tuner.plan("shape", lambda: list(PLANS), Bench({}).run) == PLANS[2]
    assert len(caplog.records) == 1


def test_the_file_is_readable_like_any_other(tmp_path: Path) -> None:
    tuned(tmp_path / "plans.json", Bench(dict.fromkeys(PLANS, 1.0)))
    (tmp_path / "other").touch()
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plans.json", "other")}
    assert len(modes) == 1


def test_where_plans_lie_and_which_cards_are_tuned(caplog: pytest.LogCaptureFixture) -> None:
    assert triton_tuning.cache_path({"WORKBENCH_TUNE_CACHE": "/a/b", "XDG_CACHE_HOME": "/c"}) == Path("/a/b")
    assert triton_tuning.cache_path({"XDG_CACHE_HOME": "/c"}) == Path("/c/quantization-workbench/kernel_plans.json")
    assert triton_tuning.cache_path({}) == Path.home() / ".cache/quantization-workbench/kernel_plans.json"
    for properties, by_default in ((H200, False), (A100, True)):
        card = Card.of(properties, "3.6.0")
        assert [triton_tuning.wanted(card, mode) for mode in ("", "0", "1")] == [by_default, False, True]
    assert not caplog.records
    assert triton_tuning.wanted(CARD, "yes")
    assert "WORKBENCH_TUNE=yes" in caplog.text


def test_the_plans_of_another_rank_replace_ones_own(tmp_path: Path) -> None:
    tuner, plan = tuned(tmp_path / "plans.json", Bench({PLANS[0]: 3.0, PLANS[1]: 2.0, PLANS[2]: 1.0}))
    assert plan == PLANS[2]
    tuner.adopt({"shape": Entry(PLANS[1], 1.0, 3.0)})
    assert tuner.plan("shape", lambda: list(PLANS), Bench({}).run) == PLANS[1]


# ---- what is shipped -------------------------------------------------------------------------------------------------


def test_the_h200s_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an H200 runs untuned: the shapes and crossovers of docs/performance.md, N = K = 8192."""
    monkeypatch.setattr(triton_configs, "multiprocessors", lambda device: 132)
    device, gluon = torch.device("cpu"), ("registers", "wgmma")
    route = {m: triton_routes.default_route(m, gluon) for m in (1, 16, 17, 64, 256, 257, 8192)}
    assert route == {
        1: "registers", 16: "registers", 17: "wgmma", 64: "wgmma", 256: "wgmma", 257: "decode", 8192: "decode"
    }  # fmt: skip
    config = triton_configs.registers
    assert [config(device, 8192, 1, 8192, t) for t in (8, 16, 32)] == [
        (8, 1, 2, 1, 128), (4, 2, 2, 1, 168), (4, 2, 2, 1, 255)
    ]  # fmt: skip
    assert [config(device, 1024, 1, 8192, 8), config(device, 512, 8, 7168, 8)] == [(8, 1, 1, 2, 128), (8, 1, 1, 1, 128)]
    assert [config(device, 7168, 8, 256, t) for t in (8, 32)] == [(1, 2, 2, 1, 128), (1, 4, 2, 1, 255)]
    assert [triton_configs.wgmma(device, 8192, 8192, m) for m in (32, 64, 128, 256)] == [
        (64, 1, 4, 3), (64, 1, 4, 3), (128, 1, 2, 3), (128, 1, 1, 3)
    ]  # fmt: skip
    assert [triton_configs.wgmma_experts(t, k) for t, k in ((32, 7168), (64, 7168), (128, 7168), (128, 256))] == [
        (32, 1, 1, 3), (64, 1, 1, 2), (128, 1, 1, 3), (128, 1, 1, 2)
    ]  # fmt: skip
    assert triton_configs.TILES == {16: (64, 256, 4, 3, 0), 32: (64, 128, 4, 3, 0), 64: (64, 128, 4, 3, 0)}


def test_candidates_start_with_the_default_and_cover_the_routes() -> None:
    for routes in ((), ("registers",), ("registers", "wgmma")):
        for m in triton_routes.BUCKETS:
            plans = triton_routes.linear_plans(m, routes)
            assert plans[0] == Plan(triton_routes.default_route(m, routes))
            assert len(set(plans)) == len(plans) <= 16
            found = {plan.route for plan in plans}
            assert found <= {*routes, "portable", "decode"}
            assert ("decode" in found) == (m > 16)
            assert ("wgmma" in found) == ("wgmma" in routes and m > 8)
        for size in (0, 8, 16, 32, 64, 128):
            if routes or size in triton_configs.TILES:
                plans = triton_routes.experts_plans(size, 7168, routes)
                assert len(set(plans)) == len(plans)
    assert triton_routes.experts_plans(128, 7168, ("registers", "wgmma"))[0] == Plan("wgmma")
    assert {p.route for p in triton_routes.experts_plans(32, 256, ("registers", "wgmma"))} == {"wgmma", "registers"}
    assert {p.route for p in triton_routes.linear_plans(64, ())} == {"portable", "decode"}


# ---- the portable kernels' candidates --------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [3, 40])
@interpreted
def test_every_candidate_gives_the_references_product(tokens: int) -> None:
    """In float32: within the band that any order of additions keeps. N and K fill no tile."""
    from workbench.kernels import triton_gemm

    generator = torch.Generator().manual_seed(0)
    n, k = 144, 608
    for weight_format in ("nvfp4", "mxfp4") if tokens == 3 else ("nvfp4",):
        w, x = (torch.randn(shape, generator=generator) for shape in ((n, k), (tokens, k)))
        if weight_format == "nvfp4":
            codes, scales, g = reference.nvfp4_quantize(w)
            dense, globals_ = reference.nvfp4_dequantize(codes, scales, g), g.view(1)
        else:
            codes, scales = reference.mxfp4_quantize(w)
            dense, globals_ = reference.mxfp4_dequantize(codes, scales), None
        expected = x.double() @ dense.double().T
        bound = 1e-6 * (x.double().abs() @ dense.double().abs().T)
        split = Plan("portable", triton_configs.Tile(64, 128, 4, 3, 2))
        plans = triton_routes.linear_plans(64 if tokens > 16 else 8, ())
        for plan in (*plans, split):
            y = triton_gemm.multiplied(plan, x, codes, scales, globals_, None, None, [n], weight_format, "none")
            assert ((y.double() - expected).abs() <= bound).all(), plan


@interpreted
def test_experts_by_every_candidate_and_a_linear_layer_by_the_fastest() -> None:
    from workbench.kernels import triton_gemm, triton_moe

    generator = torch.Generator().manual_seed(0)
    n, k, experts = 48, 352, 3
    w, x = (torch.randn(shape, generator=generator) for shape in ((experts, n, k), (5, k)))
    codes, scales, g = reference.nvfp4_quantize(w)
    dense = reference.nvfp4_dequantize(codes, scales, g).double()
    ids = torch.tensor([2, 0, -1, 2, 0], dtype=torch.int32)
    groups = triton_moe.group_by_expert(ids, experts, 16)
    here = triton_routes.multiplied(groups)
    assert sorted(here.tolist()) == [0, 1, 3, 4]
    expected = torch.stack([dense[max(e, 0)] @ x[a].double() for a, e in enumerate(ids.tolist())])
    bound = 1e-6 * torch.stack([dense[max(e, 0)].abs() @ x[a].double().abs() for a, e in enumerate(ids.tolist())])
    globals_ = g.float().reshape(1, 1).expand(experts, 1).contiguous()
    for plan in triton_routes.experts_plans(16, k, ()):
        y = triton_moe._grouped_as(plan, x.unsqueeze(0), codes, scales.view(torch.uint8), globals_, groups, 16, 1, 5,
                                   "nvfp4")  # fmt: skip
        assert ((y.double() - expected).abs() <= bound)[here].all(), plan

    ran: list[Plan] = []

    def run(plan: Plan) -> Tensor:
        ran.append(plan)
        return triton_gemm.multiplied(plan, x, codes[0], scales[0], g.view(1), None, None, [n], "nvfp4", "none")

    def timer(call: Callable[[], object]) -> float:
        call()
        return 1.0 if ran[-1] == Plan("portable", triton_configs.TILE_CANDIDATES[1]) else 2.0

    tuner = Tuner(Store(Path("/dev/null/plans.json"), CARD), timer, lambda: True)
    plan = tuner.plan("shape", lambda: triton_routes.linear_plans(8, ())[:3], run)
    assert plan == Plan("portable", triton_configs.TILE_CANDIDATES[1])
    assert ((run(plan).double() - x.double() @ dense[0].T).abs() <= 1e-6 * (x.double().abs() @ dense[0].abs().T)).all()
