"""What serving costs: load time and memory of each arm, its latencies under load, and their ratios to a baseline's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(frozen=True, kw_only=True, slots=True)
class Sourced:
    """A figure and what measured it; value NaN: not known, and source says why."""

    value: float = math.nan
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartCost:
    """One start of an arm's server. Seconds and bytes; of several workers the slowest, and the sum.

    ready: from the start to the first answer. load: constructing the model, its weights, what follows them; it splits
    into read (from disk), convert (number formats) and rest. peak_bytes, after_bytes: resident memory of the server's
    processes, the most until it was ready and then. device_peak_bytes, device_after_bytes: a GPU's allocator, the most
    while weights came and after.
    """

    arm: str
    ready_s: Sourced
    load_s: Sourced
    read_s: Sourced
    convert_s: Sourced
    rest_s: Sourced
    peak_bytes: Sourced
    after_bytes: Sourced
    device_peak_bytes: Sourced
    device_after_bytes: Sourced


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingLoad:
    """What the client sends: so many prompts of random tokens, at most `concurrency` at once."""

    input_tokens: int
    output_tokens: int
    concurrency: int
    prompts: int

    @property
    def name(self) -> str:
        return f"{self.input_tokens} in, {self.output_tokens} out, {self.concurrency} at once, {self.prompts} prompts"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientRun:
    """One run of the client against one arm. repeat 0 is the warm-up, which no ratio uses.

    order: its place among the arms of the repeat. figures: `{ttft, tpot, itl, e2el}_{mean, median, p99}_ms` and
    output_tokens_per_s, as the client counted them; of the completed requests. errors: the first few different ones.
    """

    arm: str
    load: int
    repeat: int
    order: int
    completed: int
    failed: int
    seconds: float
    figures: dict[str, float] = field(default_factory=dict)
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """An arm under a load: medians over the repeats (not the warm-up) of the client's figures, NaN where it gave none.

    completed, failed: requests of those repeats.
    """

    arm: str
    load: int
    repeats: int
    completed: int
    failed: int
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class CostRatio:
    """A figure of an arm over the baseline's, paired by repeat.

    ratio: geometric mean; low, high: 95 % t interval of the log ratio; equal_low, equal_high: its 90 % interval, which
    lies within the margin exactly if both one-sided tests at 5 % find it there. verdict: "equivalent" (it does),
    "different" (the 95 % interval lies wholly beyond the margin), "inconclusive". repeats_needed: how many would decide
    in 80 % of studies, if ratio and spread are what was seen; None: not to be told, or already decided.
    left_out: repeats with a failed request, which are not in the ratio; where there are any, nothing is equivalent.
    """

    arm: str
    load: int
    figure: str
    ratio: float
    low: float
    high: float
    equal_low: float
    equal_high: float
    margin: float
    repeats: int
    left_out: int
    verdict: str
    repeats_needed: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingCost:
    """serving_cost.json. loads: indices are used by runs and ratios. repeats: asked for. system_load: 1-minute averages
    before and after.

    together: all servers ran throughout, the others idle; else each was started for every repeat. machine, cores,
    system_load, engine_version: of what was started here, and of the client. urls: of the servers of others, by arm.
    """

    baseline: str
    arms: tuple[str, ...]
    preset: str
    loads: tuple[ServingLoad, ...]
    repeats: int
    together: bool
    date: str
    machine: str
    cores: int
    system_load: tuple[float, ...]
    engine_version: str
    starts: tuple[StartCost, ...]
    runs: tuple[ClientRun, ...]
    latencies: tuple[Latency, ...]
    ratios: tuple[CostRatio, ...]
    client: tuple[str, ...] = ()
    urls: dict[str, str] = field(default_factory=dict)

    def no_ratio(self, arm: str) -> str:
        """Why the arm has no ratio to the baseline; "": it has one."""
        return speed_apart(arm, self.baseline, self.urls)

    @property
    def measured(self) -> int:
        """Repeats that every arm has under every load: fewer than asked for where the measurement was stopped."""
        return min((latency.repeats for latency in self.latencies), default=0)

    @property
    def failed(self) -> int:
        """Requests that failed, in all runs."""
        return sum(run.failed for run in self.runs)


def speed_apart(arm: str, other: str, urls: Mapping[str, str]) -> str:
    """Why speeds of two arms are no measure of each other, "" where they are. urls: of the servers of others, by arm.

    Of a server of others neither hardware nor engine nor version are known; two on one host are taken to be alike.
    """
    foreign = [name for name in (arm, other) if name in urls]
    if not foreign:
        return ""
    if len(foreign) == 1:
        return f"{foreign[0]} is a server of others, whose hardware, engine and version are not known here"
    one, two = (urlsplit(urls[name]).hostname for name in foreign)
    return "" if one == two else f"{arm} and {other} are servers of others on two hosts, {one} and {two}"
