"""`workbench bench serve`: what serving each arm costs, measured through vLLM's own benchmark client.

    cost = bench_serve([ServeSpec(arm="offline", …), ServeSpec(arm="requant", …)], PRESETS["small"], out=folder)

The first arm is the baseline. Each repeat runs the client against every arm with the same prompts, in turn and in
alternating order (A B, B A, …), so that what a machine does meanwhile falls on both; the first repeat warms up and is
dropped. Prompts differ between repeats, so that no prefix is cached. Servers stay up, the others idle, unless
`together` is off: then each is started for each repeat, as memory that holds only one of them demands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from workbench.bench.client import FIGURES, Client, client_flags
from workbench.bench.machine import processor
from workbench.bench.ratios import compare_paired
from workbench.errors import ConfigError, EngineError
from workbench.records import (
    ClientRun,
    CostRatio,
    Latency,
    ServerRecord,
    ServingCost,
    ServingLoad,
    Sourced,
    StartCost,
    speed_apart,
)
from workbench.serving.command import engine_environment
from workbench.serving.endpoint import Endpoint, start
from workbench.serving.spec import ServeSpec

PRESETS = {
    # The published settings of requantization at load: random tokens, light and heavy concurrency.
    "published": (
        ServingLoad(input_tokens=10_240, output_tokens=512, concurrency=2, prompts=10),
        ServingLoad(input_tokens=10_240, output_tokens=512, concurrency=40, prompts=160),
    ),
    # AMD's comparison of MXFP4 made online and offline (2026-09-08).
    "requant": (ServingLoad(input_tokens=1024, output_tokens=1024, concurrency=64, prompts=200),),
    "small": (
        ServingLoad(input_tokens=64, output_tokens=16, concurrency=1, prompts=4),
        ServingLoad(input_tokens=64, output_tokens=16, concurrency=4, prompts=16),
    ),
}
RATIOS = ("ttft_mean_ms", "tpot_mean_ms", "itl_mean_ms", "e2el_mean_ms", "output_tokens_per_s")
MARGIN = 0.01
_SPARE_TOKENS = 32  # a tokenizer may make more tokens of a random prompt than were asked for
_SEED = 1000


def bench_serve(
    specs: Sequence[ServeSpec],
    loads: Sequence[ServingLoad],
    *,
    tokenizer: Path,
    out: Path,
    preset: str = "own",
    repeats: int = 10,
    margin: float = MARGIN,
    together: bool = True,
    same_layers: Sequence[str] = (),
    say: Callable[[str], object] = lambda _: None,
    save: Callable[[ServingCost], object] = lambda _: None,
) -> ServingCost:
    """Measure every arm under every load. The servers' logs and the client's own results are left below `out`.

    same_layers: arms that must hold the same layers in the same formats and bytes, as their audits say. save: is given
    what is known after each repeat, so that a run which is stopped leaves its repeats.

    Raises EngineError where they do not, ConfigError for arms or loads that cannot be measured, and what starting a
    server or the client raises.
    """
    _check(specs, loads, repeats, margin)
    specs = [_long_enough(spec, loads) for spec in specs]
    before = os.getloadavg()[0]
    starts: list[StartCost] = []
    runs: list[ClientRun] = []
    versions: list[str] = []
    layers: dict[str, dict[str, Any]] = {}

    @contextlib.contextmanager
    def serving(spec: ServeSpec) -> Iterator[Endpoint]:
        with start(spec, out / f"{spec.arm}.log") as endpoint:
            resident_bytes = endpoint.resident_bytes()  # before the record, whose peak is then at least that
            record = endpoint.record()
            starts.append(start_cost(record, out / f"{spec.arm}.log", resident_bytes))
            versions.append(record.engine_version)
            if spec.arm in same_layers:
                layers[spec.arm] = record.layers
                _check_same(layers)
            say(f"{spec.arm}: ready after {record.ready_s:.1f} s")
            yield endpoint

    arms = tuple(spec.arm for spec in specs)
    urls = {spec.arm: spec.engine.base_url for spec in specs if spec.engine.kind == "external"}
    alike = [arm for arm in arms if not speed_apart(arm, arms[0], urls)]
    example = client_flags(
        "http://HOST:PORT/v1", model=arms[0], tokenizer=tokenizer, load=loads[0], seed=_SEED, out=out / "client.json"
    )

    def cost() -> ServingCost:
        return ServingCost(
            baseline=arms[0],
            arms=arms,
            preset=preset,
            loads=tuple(loads),
            repeats=repeats,
            together=together,
            date=time.strftime("%Y-%m-%d"),
            machine=processor(),
            cores=os.cpu_count() or 1,
            system_load=(before, os.getloadavg()[0]),
            engine_version=next(filter(None, versions), ""),
            starts=tuple(starts),
            runs=tuple(runs),
            latencies=tuple(latencies_of(runs, arms, len(loads))),
            ratios=tuple(ratios_of(runs, alike, len(loads), margin)),
            client=("vllm", "bench", "serve", *example),
            urls=urls,
        )

    with contextlib.ExitStack() as stack:
        client = stack.enter_context(Client({**os.environ, **engine_environment(specs[0])}))
        up = {spec.arm: stack.enter_context(serving(spec)) for spec in specs} if together else {}
        for repeat in range(repeats + 1):
            order = list(specs) if repeat % 2 == 0 else list(reversed(specs))
            for place, spec in enumerate(order):
                with contextlib.nullcontext(up[spec.arm]) if together else serving(spec) as endpoint:
                    for load in range(len(loads)):
                        run = _run(client, endpoint, loads, load, repeat, place, tokenizer, out)
                        runs.append(run)
                        say(_line(run, loads[load]))
            if repeat:
                known = cost()
                save(known)
    return known


def latencies_of(runs: Sequence[ClientRun], arms: Sequence[str], loads: int) -> list[Latency]:
    """Medians over the repeats of every arm under every load."""
    found = []
    for load in range(loads):
        for arm in arms:
            repeats = [run for run in runs if run.arm == arm and run.load == load and run.repeat]
            known = {name: [r.figures[name] for r in repeats if not math.isnan(r.figures[name])] for name in FIGURES}
            found.append(
                Latency(
                    arm=arm,
                    load=load,
                    repeats=len(repeats),
                    completed=sum(run.completed for run in repeats),
                    failed=sum(run.failed for run in repeats),
                    figures={name: statistics.median(v) if v else math.nan for name, v in known.items()},
                )
            )
    return found


def ratios_of(runs: Sequence[ClientRun], arms: Sequence[str], loads: int, margin: float) -> list[CostRatio]:
    """RATIOS of every arm to the first, under every load, paired by repeat; the warm-up is not used."""
    found = []
    for load in range(loads):
        by_arm = {
            arm: {run.repeat: run for run in runs if run.arm == arm and run.load == load and run.repeat} for arm in arms
        }
        base = by_arm[arms[0]]
        for arm in arms[1:]:
            pairs = [(base[repeat], run) for repeat, run in sorted(by_arm[arm].items()) if repeat in base]
            whole = [(a, b) for a, b in pairs if not a.failed and not b.failed]
            for figure in RATIOS:
                found.append(_ratio(arm, load, figure, whole, len(pairs) - len(whole), margin))
    return found


def _ratio(
    arm: str, load: int, figure: str, pairs: list[tuple[ClientRun, ClientRun]], left_out: int, margin: float
) -> CostRatio:
    values = [(a.figures[figure], b.figures[figure]) for a, b in pairs]
    usable = [(a, b) for a, b in values if a > 0 and b > 0]  # one output token has no time between tokens
    ratio = compare_paired([a for a, _ in usable], [b for _, b in usable], margin)
    undecided = bool(left_out) or len(usable) < len(values)
    return CostRatio(
        arm=arm,
        load=load,
        figure=figure,
        ratio=ratio.ratio,
        low=ratio.low,
        high=ratio.high,
        equal_low=ratio.equal_low,
        equal_high=ratio.equal_high,
        margin=margin,
        repeats=len(usable),
        left_out=left_out + len(values) - len(usable),
        verdict="inconclusive" if undecided else ratio.verdict,
        repeats_needed=None if undecided else ratio.needed,
    )


# ---- starting --------------------------------------------------------------------------------------------------------


def start_cost(record: ServerRecord, log: Path, resident_bytes: int | None) -> StartCost:
    """What a start cost, each figure from where it is measured: the audit beside `log`, or the engine's log."""
    audits = _audits(log)
    text = log.read_text(errors="replace") if log.exists() else ""
    external = record.engine == "external"
    meter = [audit.get("load") or {} for audit in audits]
    load = _load_seconds(record, text)
    read = _metered(meter, "read_s", max)
    convert = _conversion(meter)
    if math.isnan(read.value):
        read = _logged(text, r"Loading weights took ([\d.]+) seconds", "engine's log: loading weights, converting too")
    parts = [load.value, read.value, 0.0 if math.isnan(convert.value) else convert.value]
    rest = Sourced(value=parts[0] - parts[1] - parts[2], source="load without the other two")
    if math.isnan(rest.value):
        rest = Sourced(source="load or read is not known")
    ours = "an external server: not ours to measure" if external else ""
    return StartCost(
        arm=record.arm,
        ready_s=Sourced(source=ours) if external else Sourced(value=record.ready_s, source="clock of the workbench"),
        load_s=load,
        read_s=read,
        convert_s=convert,
        rest_s=rest,
        peak_bytes=_bytes(record.peak_rss_bytes, ours),
        after_bytes=_bytes(resident_bytes, ours),
        device_peak_bytes=_device(meter, "device_peak_bytes"),
        device_after_bytes=_device(meter, "device_final_bytes", text),
    )


def _load_seconds(record: ServerRecord, text: str) -> Sourced:
    if not math.isnan(record.load_s):
        return Sourced(value=record.load_s, source="plugin's audit")
    return _logged(text, r"Model loading took .*?([\d.]+) seconds", "engine's log: model loading")


def _logged(text: str, pattern: str, source: str, scale: float = 1.0) -> Sourced:
    values = [float(value) * scale for value in re.findall(pattern, text)]
    return Sourced(value=max(values), source=source) if values else Sourced(source="the engine's log does not say it")


def _metered(meters: list[dict[str, Any]], key: str, join: Callable[[list[float]], float]) -> Sourced:
    values = [float(meter[key]) for meter in meters if meter.get(key) is not None]
    if not values:
        return Sourced(source="no audit: the server runs without the plugin" if not meters else "the audit has none")
    return Sourced(value=join(values), source="plugin's audit")


def _conversion(meters: list[dict[str, Any]]) -> Sourced:
    found, waited = (_metered(meters, key, max) for key in ("convert_s", "prepare_waited_s"))
    if waited.value > 0:
        return dataclasses.replace(found, source=f"{found.source}; waiting for kernels: {waited.value:.2f} s of it")
    return found


def _device(meters: list[dict[str, Any]], key: str, text: str = "") -> Sourced:
    found = _metered(meters, key, sum)
    if not math.isnan(found.value):
        return dataclasses.replace(found, source="plugin's audit: the GPU's allocator")
    logged = _logged(text, r"Model loading took ([\d.]+) GiB", "engine's log: model loading", 2**30)
    if not math.isnan(logged.value):
        return logged
    return dataclasses.replace(found, source="no GPU, or nothing measured there")


def _bytes(value: int | None, why: str) -> Sourced:
    if value is None:
        return Sourced(source=why or "no process was seen")
    return Sourced(value=float(value), source="resident memory of the server's processes, sampled")


def _audits(log: Path) -> list[dict[str, Any]]:
    """Every rank's, as the plugin wrote them beside the log."""
    files = sorted(log.parent.glob(f"{log.stem}.audit.json*"))
    return [json.loads(file.read_text()) for file in files]


def _check_same(layers: dict[str, dict[str, Any]]) -> None:
    """What one arm runs, the others run; else a ratio of their times compares two models."""
    (first, expected), *others = layers.items()
    for arm, found in others:
        different = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
        if different:
            name = different[0]
            raise EngineError(
                f"{arm} and {first} do not run the same: {len(different)} layers differ, the first {name}:"
                f" {found.get(name)} against {expected.get(name)}",
                fix="exclude the same modules from both (--exclude)",
            )


# ---- private ---------------------------------------------------------------------------------------------------------


def _run(
    client: Client,
    endpoint: Endpoint,
    loads: Sequence[ServingLoad],
    load: int,
    repeat: int,
    place: int,
    tokenizer: Path,
    out: Path,
) -> ClientRun:
    arm = endpoint.spec.arm
    found = client.run(
        endpoint.base_url,
        model=endpoint.model,
        tokenizer=tokenizer,
        load=loads[load],
        seed=_SEED + repeat * len(loads) + load,  # prompts of its own: a cache of prefixes would answer for them
        out=out / "client" / f"{arm}-{load}-{repeat}.json",
    )
    endpoint.check()
    return ClientRun(
        arm=arm,
        load=load,
        repeat=repeat,
        order=place,
        completed=found.completed,
        failed=found.failed,
        seconds=found.seconds,
        figures={name: found.figures[name] for name in FIGURES},
        errors=found.errors,
    )


def _line(run: ClientRun, load: ServingLoad) -> str:
    which = f"repeat {run.repeat}" if run.repeat else "warm-up"
    failed = f", {run.failed} of {load.prompts} requests failed" if run.failed else ""
    figures = f"{run.figures['output_tokens_per_s']:.1f} tokens/s, TTFT {run.figures['ttft_mean_ms']:.0f} ms"
    return f"{which}, {run.arm}, {load.name}: {figures}{failed}"


def _check(specs: Sequence[ServeSpec], loads: Sequence[ServingLoad], repeats: int, margin: float) -> None:
    names = [spec.arm for spec in specs]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"arms {', '.join(names) or '(none)'} cannot be told apart", fix="give each its own name")
    for load in loads:
        if min(load.input_tokens, load.output_tokens, load.concurrency, load.prompts) < 1:
            raise ConfigError(f"a load of {load.name} cannot be sent", fix="use numbers of 1 or more")
    check_repeats(repeats, margin)


def check_repeats(repeats: int, margin: float) -> None:
    """Raises ConfigError for repeats or a margin with which nothing can be measured."""
    if repeats < 1:
        raise ConfigError(f"{repeats} repeats", fix="1 or more; 10 for an interval that decides")
    if not 0 < margin < 1:
        raise ConfigError(f"a margin of {margin}", fix="a proportion between 0 and 1, e.g. 0.01 for 1 %")


def loads_of(preset: str, max_model_len: int) -> tuple[ServingLoad, ...]:
    """A preset's loads. Raises ConfigError for an unknown one, or one longer than the context (0: not known yet)."""
    if preset not in PRESETS:
        raise ConfigError(f"serving_cost.preset={preset!r}", fix=f"choose one of: off, {', '.join(PRESETS)}")
    needed = _tokens(PRESETS[preset])
    if 0 < max_model_len < needed:
        raise ConfigError(
            f"serving_cost={preset} sends requests of {needed} tokens, engine.max_model_len is {max_model_len}",
            fix=f"engine.max_model_len={needed}, as far as the model goes, or serving_cost=small",
        )
    return PRESETS[preset]


def _tokens(loads: Sequence[ServingLoad]) -> int:
    return max(load.input_tokens + load.output_tokens for load in loads) + _SPARE_TOKENS


def _long_enough(spec: ServeSpec, loads: Sequence[ServingLoad]) -> ServeSpec:
    """The engine's context made to fit the longest request, where it was left open (0)."""
    needed = _tokens(loads)
    if spec.engine.kind == "external":
        return spec
    if not spec.engine.max_model_len:
        return dataclasses.replace(spec, engine=dataclasses.replace(spec.engine, max_model_len=needed))
    if spec.engine.max_model_len < needed:
        raise ConfigError(
            f"arm {spec.arm} holds {spec.engine.max_model_len} tokens, a request of this load needs {needed}",
            fix=f"max_model_len={needed} or more, or a shorter load",
        )
    return spec
