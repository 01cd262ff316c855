"""`workbench bench serve` with the servers and the client replaced at the process border."""

from __future__ import annotations

import contextlib
import json
import math
import os
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench import cli
from workbench.arms import Arms
from workbench.bench import client, serve
from workbench.bench.serve_table import table
from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.convert import quantize_checkpoint
from workbench.composition import compose
from workbench.errors import ConfigError, EngineError
from workbench.experiment import _check_rooms, _Run
from workbench.interrupt import Interrupted
from workbench.progress import Progress
from workbench.records import ServerRecord, ServingCost, ServingLoad, from_json, to_json
from workbench.serving.spec import EngineSpec, ServeSpec
from workbench.settings import Settings, read_settings

MINI_KIMI = Path(str(files("workbench.mini_models"))) / "mini_kimi"
LOAD = ServingLoad(input_tokens=8, output_tokens=4, concurrency=2, prompts=5)
AUDIT = {
    "load_s": 3.0,
    "load": {"read_s": 0.5, "convert_s": 1.5, "device_peak_bytes": None, "device_final_bytes": None},
}


def server_record(arm: str = "a", **changes: Any) -> ServerRecord:
    fields: dict[str, Any] = {
        "arm": arm, "engine": "vllm", "base_url": "", "model": arm, "checkpoint": "", "backend": "emulation",
        "weight_format": "", "activation_format": "", "activation_scale": "none", "kv_cache_dtype": "auto",
        "dtype": "bfloat16", "ready_s": 9.0, "load_s": 3.0, "peak_rss_bytes": 5000, "engine_version": "vllm 0",
    }  # fmt: skip
    return ServerRecord(**fields | changes)


class FakeServers:
    """Counts starts; `slow` arms take twice as long; `fails[(arm, repeat)]` requests fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slow: tuple[str, ...] = ()) -> None:
        self.starts: list[str] = []
        self.sent: list[tuple[str, int, int]] = []
        self.up = self.most_up = 0
        self.fails: dict[tuple[str, int], int] = {}
        self.slow = slow
        monkeypatch.setattr(serve, "start", self.start)
        monkeypatch.setattr(serve.Client, "run", self.run)

    @contextlib.contextmanager
    def start(self, spec: ServeSpec, log: Path) -> Any:
        self.starts.append(spec.arm)
        self.up += 1
        self.most_up = max(self.up, self.most_up)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        log.with_name(f"{log.stem}.audit.json").write_text(json.dumps(AUDIT))

        class Up:
            base_url, model = "http://x/v1", spec.arm

            def record(self) -> ServerRecord:
                return server_record(spec.arm)

            def resident_bytes(self) -> int:
                return 4000

            def check(self) -> None: ...

        up = Up()
        up.spec = spec  # type: ignore[attr-defined]
        yield up
        self.up -= 1

    def run(self, base_url: str, *, model: str, seed: int, load: ServingLoad, **_: Any) -> client.ClientResult:
        repeat = seed - serve._SEED
        self.sent.append((model, repeat, seed))
        times = (2.0 if model in self.slow else 1.0) * (1.0 + repeat / 100)  # a drift that both arms share
        failed = self.fails.get((model, repeat), 0)
        figures = {name: 10.0 * times for name in client.FIGURES} | {"output_tokens_per_s": 100 / times}
        errors = ("Service Unavailable",) if failed else ()
        return client.ClientResult(
            completed=load.prompts - failed, failed=failed, seconds=times, figures=figures, errors=errors
        )


def measure(tmp_path: Path, arms: tuple[str, ...] = ("a", "b"), **options: Any) -> ServingCost:
    specs = [ServeSpec(arm=arm, checkpoint=tmp_path) for arm in arms]
    options = {"repeats": 3, "out": tmp_path, "tokenizer": tmp_path} | options
    return serve.bench_serve(specs, [LOAD], **options)


def test_repeats_alternate_share_their_prompts_and_drop_the_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = FakeServers(monkeypatch, slow=("b",))
    cost = measure(tmp_path)
    assert servers.starts == ["a", "b"]
    assert servers.most_up == 2
    assert [arm for arm, _, _ in servers.sent] == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert len({seed for _, _, seed in servers.sent}) == 4  # a warm-up and three repeats, each its own prompts
    by_name = {ratio.figure: ratio for ratio in cost.ratios}
    assert set(by_name) == set(serve.RATIOS)
    assert by_name["ttft_mean_ms"].ratio == pytest.approx(2.0)  # the drift is in both
    assert by_name["output_tokens_per_s"].ratio == pytest.approx(0.5)
    assert (by_name["ttft_mean_ms"].repeats, by_name["ttft_mean_ms"].verdict) == (3, "different")
    assert from_json(ServingCost, to_json(cost)) == cost
    text = table(cost)
    assert (
        "| 8 in, 4 out, 2 at once, 5 prompts | b | ttft_mean_ms | 2.0000 | 2.0000 to 2.0000 | different | 3 |" in text
    )
    assert "failed" not in text


def test_where_memory_holds_one_server_each_is_started_for_each_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = FakeServers(monkeypatch)
    cost = measure(tmp_path, together=False)
    assert servers.starts == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert servers.most_up == 1
    assert len(cost.starts) == 8
    assert {ratio.verdict for ratio in cost.ratios} == {"equivalent"}


def test_failed_requests_are_counted_and_nothing_is_equivalent_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = FakeServers(monkeypatch)
    servers.fails[("b", 2)] = 4
    cost = measure(tmp_path)
    assert cost.failed == 4
    for ratio in cost.ratios:
        assert (ratio.repeats, ratio.left_out, ratio.verdict) == (2, 1, "inconclusive")
    text = table(cost)
    assert "4 of 40 requests failed:" in text
    assert "- b, 8 in, 4 out, 2 at once, 5 prompts, repeat 2: 4 (Service Unavailable)" in text
    assert "inconclusive: 1 repeats left out" in text


def test_a_start_says_where_each_figure_comes_from(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("Loading weights took 2.25 seconds\nModel loading took 1.5 GiB memory and 4.125000 seconds\n")
    stock = serve.start_cost(server_record(load_s=math.nan), log, 7)
    assert (stock.load_s.value, stock.read_s.value, stock.rest_s.value) == (4.125, 2.25, 1.875)
    assert stock.load_s.source == "engine's log: model loading"
    assert math.isnan(stock.convert_s.value)
    assert "without the plugin" in stock.convert_s.source
    assert stock.device_after_bytes.value == 1.5 * 2**30
    (tmp_path / "a.audit.json").write_text(json.dumps(AUDIT))
    (tmp_path / "a.audit.json.rank1").write_text(json.dumps({**AUDIT, "load": {**AUDIT["load"], "convert_s": 2.0}}))
    ours = serve.start_cost(server_record(), log, 7)
    assert (ours.load_s.value, ours.read_s.value, ours.convert_s.value, ours.rest_s.value) == (3.0, 0.5, 2.0, 0.5)
    assert (ours.peak_bytes.value, ours.after_bytes.value) == (5000, 7)
    assert ours.convert_s.source == "plugin's audit"
    waited = {**AUDIT, "load": {**AUDIT["load"], "prepare_s": 0.9, "prepare_waited_s": 0.25}}
    (tmp_path / "a.audit.json").write_text(json.dumps(waited))
    on_gpu = serve.start_cost(server_record(), log, 7)
    assert on_gpu.convert_s.value == 2.0
    assert on_gpu.convert_s.source == "plugin's audit; waiting for kernels: 0.25 s of it"
    log.write_text("")
    (tmp_path / "a.audit.json").unlink()
    (tmp_path / "a.audit.json.rank1").unlink()
    external = serve.start_cost(server_record(engine="external", load_s=math.nan, peak_rss_bytes=None), log, None)
    assert all(math.isnan(figure.value) for figure in (external.ready_s, external.load_s, external.peak_bytes))
    assert "not ours to measure" in external.peak_bytes.source


def test_arms_that_must_run_the_same_layers_and_do_not_are_refused() -> None:
    packed = {"model.layers.0.q": {"weight": "mxfp4", "weight_bytes": 17}}
    serve._check_same({"offline": packed, "requant": dict(packed)})
    dense = {"model.layers.0.q": {"weight": "bf16", "weight_bytes": 64}}
    with pytest.raises(EngineError, match=r"requant and offline do not run the same: 1 layers .*bf16.*against"):
        serve._check_same({"offline": packed, "requant": dense})
    with pytest.raises(EngineError, match="1 layers"):
        serve._check_same({"offline": packed, "requant": {}})


def test_the_offline_half_converts_what_the_source_quantizes_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "nvfp4"
    kept = ["*self_attn*", "lm_head"]
    quantize_checkpoint(MINI_KIMI, source, format="nvfp4", dialect="modelopt", exclude=kept)
    specs: list[ServeSpec] = []
    monkeypatch.setattr(serve, "bench_serve", lambda found, *_, **options: specs.extend(found) or stop(options))

    def stop(options: dict[str, Any]) -> None:
        assert options["same_layers"] == ("offline", "requant")
        raise ConfigError("far enough")

    assert cli.main(["bench", "serve", "--requant", str(source), "--out", str(tmp_path / "out")]) == 3
    assert [(spec.arm, spec.backend, spec.format) for spec in specs] == [
        ("offline", "emulation", None),
        ("requant", "requant", "mxfp4"),
    ]
    formats = []
    for folder in (source, Path(specs[0].checkpoint)):
        with open_checkpoint(folder) as checkpoint:
            formats.append({entry.name: entry.format for entry in checkpoint.entries()})
    assert set(formats[0].values()) >= {"nvfp4", "bf16"}
    assert formats[1] == {name: "mxfp4" if format == "nvfp4" else format for name, format in formats[0].items()}


def test_the_context_fits_the_load_or_is_refused(tmp_path: Path) -> None:
    spec = ServeSpec(arm="a", checkpoint=tmp_path)
    assert serve._long_enough(spec, [LOAD]).engine.max_model_len == 8 + 4 + serve._SPARE_TOKENS
    short = ServeSpec(arm="a", checkpoint=tmp_path, engine=EngineSpec(max_model_len=20))
    with pytest.raises(ConfigError, match="needs 44"):
        serve._long_enough(short, [LOAD])


def test_the_presets_are_the_published_settings_and_a_small_one() -> None:
    found = [
        (load.input_tokens, load.output_tokens, load.concurrency, load.prompts) for load in serve.PRESETS["published"]
    ]
    assert found == [(10_240, 512, 2, 10), (10_240, 512, 40, 160)]
    assert serve.PRESETS["small"]


def test_the_clients_result_is_read_and_what_is_not_completed_has_failed() -> None:
    data = {
        "completed": 3, "failed": 0, "duration": 2.5, "output_throughput": 40.0, "mean_ttft_ms": 11.0,
        "median_ttft_ms": 10.0, "p99_ttft_ms": 20.0, "errors": ["", "refused\n", "refused\n"],
    }  # fmt: skip
    found = client.read_result(data, LOAD)
    assert (found.completed, found.failed, found.errors) == (3, 2, ("refused",))
    assert (found.figures["ttft_mean_ms"], found.figures["output_tokens_per_s"]) == (11.0, 40.0)
    assert math.isnan(found.figures["tpot_mean_ms"])
    assert set(found.figures) == set(client.FIGURES)


def test_a_client_that_dies_is_shown_with_its_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "r.json"
    answers = {"completed": 5, "duration": 1.0}
    script = f"""
import json, sys
for number, line in enumerate(sys.stdin):
    flags = json.loads(line)
    if number == 0:
        open(flags[flags.index("--result-dir") + 1] + "/r.json", "w").write({json.dumps(answers)!r})
        print("noise\\n{client._MARK}ok", flush=True)
    elif number == 1:
        print("no such tokenizer\\n{client._MARK}failed", flush=True)
    else:
        sys.exit("out of memory")
"""
    monkeypatch.setattr(client, "_SCRIPT", script)
    ask = {"model": "m", "tokenizer": tmp_path, "load": LOAD, "seed": 1, "out": out}
    with client.Client(dict(os.environ)) as one:
        assert one.run("http://x/v1", **ask).completed == 5
        with pytest.raises(EngineError, match="client failed against http://x/v1:\n    no such tokenizer"):
            one.run("http://x/v1", **ask)
        with pytest.raises(EngineError, match=r"client died .*\n    out of memory"):
            one.run("http://x/v1", **ask)
        with pytest.raises(EngineError, match="client died"):
            one.run("http://x/v1", **ask)


@pytest.mark.parametrize(
    ("urls", "why"),
    [
        ({"a": "http://x:1/v1", "b": "http://x:2/v1"}, ""),
        ({"a": "http://x:1/v1", "b": "http://y:1/v1"}, "b and a are servers of others on two hosts, y and x"),
        ({"b": "http://x:1/v1"}, "b is a server of others, whose hardware, engine and version are not known here"),
    ],
)
def test_servers_of_others_have_a_ratio_on_one_host_only(
    urls: dict[str, str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeServers(monkeypatch)
    engines = {arm: EngineSpec(kind="external", base_url=url) for arm, url in urls.items()}
    specs = [ServeSpec(arm=arm, checkpoint=tmp_path, engine=engines.get(arm, EngineSpec())) for arm in ("a", "b")]
    cost = serve.bench_serve(specs, [LOAD], repeats=2, out=tmp_path, tokenizer=tmp_path)
    assert cost.no_ratio("b") == why
    assert bool(cost.ratios) == (not why)
    assert {latency.arm for latency in cost.latencies} == {"a", "b"}
    assert (f"- no ratio of b to a: {why}" in table(cost)) == bool(why)
    assert from_json(ServingCost, to_json(cost)) == cost


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no arm is named"),
        (["--arm", "a=x", "--input", "8"], "lacks output_tokens"),
        (
            ["--arm", "a=x", "--input", "8", "--output", "4", "--concurrency", "1", "2", "3", "--prompts", "5", "6"],
            "give prompts once, or 3 times",
        ),
        (["--arm", "a=x,speed=2"], "unknown 'speed'"),
        (["--arm", "a=x", "--arm", "a=y"], "told apart"),
        (["--arm", "a=x", "--margin", "2"], "margin of 2.0"),
    ],
)
def test_what_cannot_be_measured_ends_in_3(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "serve", *flags, "--out", str(tmp_path)]) == 3
    assert message in capsys.readouterr().err


def test_the_command_writes_the_record_and_prints_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = FakeServers(monkeypatch, slow=("b",))
    model = tmp_path / "model"
    model.mkdir()
    arms = ["--arm", f"a={model},backend=reference", "--arm", f"b={model},backend=requant,format=mxfp4"]
    load = ["--input", "8", "--output", "4", "--concurrency", "2", "--prompts", "5"]
    assert cli.main(["bench", "serve", *arms, *load, "--repeat", "2", "--out", str(tmp_path / "run")]) == 0
    cost = from_json(ServingCost, (tmp_path / "run" / "serving_cost.json").read_text())
    assert (cost.arms, cost.baseline, cost.preset, cost.loads) == (("a", "b"), "a", "own", (LOAD,))
    printed = capsys.readouterr().out
    assert "| b | 9.00 | 3.00 | 0.50 | 1.50 | 1.00 |" in printed
    assert "warm-up, a, 8 in, 4 out" in printed
    two = ["--input", "8", "--output", "4", "--concurrency", "2", "3", "--prompts", "5", "6"]
    assert cli.main(["bench", "serve", *arms, *two, "--repeat", "1", "--out", str(tmp_path / "two")]) == 0
    cost = from_json(ServingCost, (tmp_path / "two" / "serving_cost.json").read_text())
    assert cost.loads == (LOAD, ServingLoad(input_tokens=8, output_tokens=4, concurrency=3, prompts=6))
    prompts = [seed for arm, _, seed in servers.sent[-8:] if arm == "a"]
    assert len(prompts) == len(set(prompts)) == 4  # two loads, a warm-up and a repeat: none has another's prompts
    assert sorted(prompts) == sorted(seed for arm, _, seed in servers.sent[-8:] if arm == "b")


def test_a_run_that_is_stopped_leaves_its_whole_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = FakeServers(monkeypatch, slow=("b",))
    answer = servers.run

    def run(base_url: str, **asked: Any) -> client.ClientResult:
        if (asked["model"], asked["seed"] - serve._SEED) == ("a", 3):
            raise Interrupted("SIGTERM")
        return answer(base_url, **asked)

    monkeypatch.setattr(serve.Client, "run", staticmethod(run))
    model = tmp_path / "model"
    model.mkdir()
    out = tmp_path / "run"
    arms = ["--arm", f"a={model},backend=reference", "--arm", f"b={model},backend=requant,format=mxfp4"]
    load = ["--input", "8", "--output", "4", "--concurrency", "2", "--prompts", "5"]
    with contextlib.suppress(Interrupted, SystemExit):
        cli.main(["bench", "serve", *arms, *load, "--repeat", "9", "--out", str(out)])
    cost = from_json(ServingCost, (out / "serving_cost.json").read_text())
    assert (cost.measured, cost.repeats) == (2, 9)
    assert {ratio.repeats for ratio in cost.ratios} == {2}
    assert "stopped after 2 of 9 repeats" in table(cost)
    assert f"{out / 'serving_cost.json'} holds 2 of 9 repeats" in capsys.readouterr().err


def answered(folder: Path, settings: Settings) -> None:
    """Every arm has been evaluated before."""
    for arm in settings.arms:
        scores = folder / "eval" / arm / "scores.json"
        scores.parent.mkdir(parents=True)
        scores.write_text("")


def test_an_experiment_measures_it_once_after_the_answers_and_leaves_the_noise_arm_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = FakeServers(monkeypatch)
    run, settings = experiment_run(tmp_path, monkeypatch, "serving_cost=small", "serving_cost.repeat=1")
    answered(tmp_path, settings)
    run.evaluate()
    cost = from_json(ServingCost, (tmp_path / "serving_cost.json").read_text())
    assert cost.arms == ("source", "nvfp4", "nvfp4_to_mxfp4", "mxfp4_direct")
    assert (cost.baseline, cost.preset, cost.repeats) == ("source", "small", 1)
    started = len(servers.starts)
    run.evaluate()
    assert len(servers.starts) == started  # what is there is not measured again


def test_the_requantization_study_is_as_fast_as_offline_not_as_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeServers(monkeypatch)
    asked = ("experiment=requant_five_models", "serving_cost=small", "serving_cost.repeat=1")
    run, settings = experiment_run(tmp_path, monkeypatch, *asked)
    answered(tmp_path, settings)
    run.evaluate()
    cost = from_json(ServingCost, (tmp_path / "serving_cost.json").read_text())
    assert (settings.baseline, cost.baseline) == ("source", "offline")
    assert cost.arms == ("offline", "source", "nvfp4", "online")
    assert {r.arm for r in cost.ratios} == {"source", "nvfp4", "online"}
    with pytest.raises(ConfigError, match=r"serving_cost\.baseline 'on_line' is not among the arms"):
        read_settings(compose([*asked, "serving_cost.baseline=on_line"]))


def test_by_default_an_experiment_measures_no_serving_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = FakeServers(monkeypatch)
    run, settings = experiment_run(tmp_path, monkeypatch)
    assert settings.serving_cost.preset == "off"
    answered(tmp_path, settings)
    run.evaluate()
    assert not servers.starts
    assert not (tmp_path / "serving_cost.json").exists()


def test_a_preset_longer_than_the_context_is_refused_before_anything_runs(tmp_path: Path) -> None:
    composed = read_settings(compose(["experiment=kimi_requant", "serving_cost=published"]))
    with pytest.raises(ConfigError, match="sends requests of 10784 tokens"):
        _check_rooms(composed)
    unknown = read_settings(compose(["experiment=kimi_requant", "serving_cost.preset=big"]))
    with pytest.raises(ConfigError, match=r"serving_cost\.preset='big'"):
        _check_rooms(unknown)


def experiment_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> tuple[_Run, Settings]:
    """A run whose checkpoints are all in one place, and what it is to do."""
    settings = read_settings(compose(["experiment=kimi_requant", *overrides]))
    monkeypatch.setattr(Arms, "folder", lambda self, checkpoint: tmp_path)
    monkeypatch.setattr(Arms, "_exclude", lambda self, arm: ())
    folder: Any = SimpleNamespace(path=tmp_path)
    return _Run(settings=settings, folder=folder, say=Progress()), settings
