"""A run folder made from a small seeded example: real weights analysis, simulated answers, real statistics and gate.

make_sample_run(Path("run"))
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from workbench import records
from workbench.analysis.study import analyze_pairs
from workbench.checkpoints.convert import quantize_checkpoint
from workbench.checkpoints.open import open_checkpoint
from workbench.comparison import digest
from workbench.gating import gate
from workbench.records import (
    ArtefactPanel,
    Bounded,
    Comparison,
    Divergence,
    Evaluation,
    Flip,
    LengthDrift,
    LintFinding,
    LintReport,
    LostAnswers,
    Manifest,
    Preflight,
    PreflightFinding,
    PreflightTask,
    ServerRecord,
    TaskComparison,
    TaskScore,
    Transport,
)
from workbench.records.judged import evidence_digests
from workbench.statistics import (
    loss_interval,
    loss_upper_bound,
    mcnemar_exact,
    minimum_detectable_loss,
    recovery_interval,
    wilson_interval,
)

ARMS = ("source", "source_again", "nvfp4", "nvfp4_to_mxfp4", "mxfp4_direct")
TASKS = (("gsm8k_mini", "strict-match"), ("gsm8k_mini", "flexible-extract"), ("mmlu_pro_mini", "custom-extract"))
LAYERS, EXPERTS, HIDDEN, INNER, ITEMS = 3, 6, 128, 64, 120
HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)>"


@dataclass(frozen=True)
class _Pair:
    first: str
    second: str
    direct: str | None = None


@dataclass(frozen=True)
class _Format:
    name: str
    rule: str | None = None


def make_sample_run(run_dir: Path) -> None:
    """Fill `run_dir` with every file that a report reads."""
    run_dir.mkdir(parents=True)
    paths = make_sample_checkpoints(run_dir.parent / "checkpoints")
    requant = (paths["nvfp4"], _Format("mxfp4", "even"), "auto")
    analyze_pairs(
        out=run_dir,
        source_arm="source",
        pairs=[_Pair("nvfp4", "nvfp4_to_mxfp4", "mxfp4_direct")],
        arms={
            "source": (paths["source"], None, "none"),
            "nvfp4": (paths["nvfp4"], None, "auto"),
            "nvfp4_to_mxfp4": requant,
            "mxfp4_direct": (paths["mxfp4"], None, "auto"),
        },
        activations=None,
        bootstrap=100,
    )
    evaluations = _simulate_answers(run_dir)
    comparison = _compare(run_dir, evaluations)
    lint = _write_lint(run_dir, paths)
    _write_servers(run_dir, paths)
    _write_divergence(run_dir)
    policy = {
        "name": "smoke",
        "note": "Smoke policy, for few items: it catches a broken arm, not a small loss.",
        "margin_pp": {"default": 10.0},
        "gated": ["nvfp4", "nvfp4_to_mxfp4"],
        "reported": ["mxfp4_direct"],
        "weights": {"min_sqnr_db": 10.0, "max_below_median_db": 4.0},
    }
    import pandas as pd

    tensors = pd.read_parquet(run_dir / "tensors.parquet")
    verdict = gate(
        policy, comparison=comparison, lint=lint, tensors=tensors, evaluations=evaluations,
        judged=evidence_digests(run_dir, comparison),
    )  # fmt: skip
    records.write_json(run_dir / "verdict.json", verdict)
    _write_manifest(run_dir, paths)


def make_sample_checkpoints(root: Path) -> dict[str, Path]:
    """A BF16 source of three layers and six experts, and its NVFP4 and MXFP4 checkpoints, by name."""
    generator = torch.Generator().manual_seed(11)
    tensors = {"model.embed_tokens.weight": torch.randn(32, HIDDEN, generator=generator).bfloat16()}
    for layer in range(LAYERS):
        block = f"model.layers.{layer}.mlp"
        owners = [f"{block}."] if layer == 0 else [f"{block}.experts.{e}." for e in range(EXPERTS)]
        owners += [] if layer == 0 else [f"{block}.shared_experts."]
        for owner in owners:
            for projection, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
                scale = 0.02 * 2 ** float(torch.rand(1, generator=generator))  # a phase of its own
                w = scale * torch.randn(*shape, generator=generator)
                tensors[f"{owner}{projection}_proj.weight"] = w.bfloat16()
    source = root / "source"
    source.mkdir(parents=True)
    config = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(config))
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    quantize_checkpoint(source, root / "nvfp4", format="nvfp4", dialect="modelopt", exclude=["*embed_tokens"])
    quantize_checkpoint(source, root / "mxfp4", format="mxfp4", dialect="quark", exclude=["*embed_tokens"])
    return {name: root / name for name in ("source", "nvfp4", "mxfp4")}


def _simulate_answers(run_dir: Path) -> dict[str, Evaluation]:
    """Seeded right/wrong vectors: the arms flip a few items of the source's."""
    rng = np.random.default_rng(5)
    flip_share = {"source": 0.0, "source_again": 0.0, "nvfp4": 0.03, "nvfp4_to_mxfp4": 0.06, "mxfp4_direct": 0.05}
    right = {task: rng.random(ITEMS) < 0.85 for task in TASKS}
    evaluations = {}
    for arm in ARMS:
        scores = []
        for task, name in TASKS:
            correct = right[task, name] ^ (rng.random(ITEMS) < flip_share[arm])
            np.save(run_dir / f".{arm}-{task}-{name}.npy", correct)
            hits = int(correct.sum())
            low, high = wilson_interval(hits, ITEMS)
            scores.append(
                TaskScore(
                    arm=arm, task=task, filter=name, metric="exact_match", n=ITEMS, value=hits / ITEMS, low=low,
                    high=high, num_fewshot=2, samples=f"eval/{arm}/samples_{task}.jsonl", primary=name != TASKS[1][1],
                    empty=0, invalid=1 if arm == "nvfp4" else 0, seconds=31.5,
                )
            )  # fmt: skip
        evaluations[arm] = Evaluation(
            arm=arm, scores=tuple(scores), harness="lm_eval 0.4.13", seconds=63.0,
            concurrency=4 if "again" in arm else 8,
            command=("lm_eval", "run", "--model", "local-completions", "--tasks", "gsm8k_mini,mmlu_pro_mini"),
            request_order="reversed" if "again" in arm else "forward", task_fingerprints={"gsm8k_mini": "9f2c11d0"},
            panels=tuple(_panel(score) for score in scores if score.primary),
            transport=Transport(requests=160, resumed=0, retries=2, failed=0, faults={"http_500": 2},
                                examples={"http_500": "<b>Internal</b> error"}, latency_median_s=1.5),
        )  # fmt: skip
        records.write_json(run_dir / "eval" / arm / "scores.json", evaluations[arm])
        for name in {score.samples for score in scores}:  # the comparison stands on these files' bytes, not on rows
            (run_dir / name).write_text(f"{arm}\n")
        records.write_json(run_dir / "eval" / arm / "mini" / "preflight.json", _preflight(arm))
    return evaluations


def _preflight(arm: str) -> Preflight:
    """One that was refused among sound ones."""
    tasks = tuple(
        PreflightTask(
            task=task, kind="generate_until", documents=ITEMS, requests=ITEMS, longest_prompt_tokens=411,
            prompt_tokens=ITEMS * 380, answer_budget_tokens=256, stops=("Question:",), data_fingerprint="9f2c11d0aa",
            prompt_fingerprint="77ab01c2dd", mde_pp={"0.02": 3.18, "0.04": 4.52, "0.08": 6.41},
        )
        for task in ("gsm8k_mini", "mmlu_pro_mini")
    )  # fmt: skip
    refused = PreflightFinding(
        id="prompt-length", level="error", message="task 'gsm8k_mini': 411 + 256 tokens do not fit 512",
        fix="serve a longer context",
    )  # fmt: skip
    return Preflight(
        arm=arm, endpoint="http://127.0.0.1:8001/v1/completions", api="completions", model=arm,
        harness="lm-eval 0.4.13", max_length=2048, server_max_length=2048, server={}, tasks=tasks,
        probe_s=1.5, estimate_s=95.0, estimate_high_s=310.0, findings=(refused,) if arm == "mxfp4_direct" else (),
    )  # fmt: skip


def _panel(score: TaskScore) -> ArtefactPanel:
    drift = LengthDrift(
        baseline="source", n=score.n, unit="tokens", ratio=1.034, ratio_low=0.98, ratio_high=1.09, identical=61
    )
    lost = LostAnswers(
        baseline="source", n=score.n, lost=10, gained=1, failed=0, null=0, unfinished=0, cut_early=2, cut=1, empty=0,
        unextracted=0, finished=6, clean_n=110, clean_lost=6, clean_gained=1, prompts_counted=score.n, prompts_differ=0,
        odd_finish=1,
    )  # fmt: skip
    return ArtefactPanel(
        arm=score.arm, task=score.task, filter=score.filter, n=score.n, truncated=7, empty=0, null=0, failed=0,
        stopped=score.n - 7, stop_leaks=0, disagreements=3, invalid={score.filter: score.invalid}, duplicates=2,
        think_leaks=-1, unfinished=0, length_median_tokens=80.0, length_max_tokens=256.0, accuracy_all=score.value,
        accuracy_all_low=score.low, accuracy_all_high=score.high, finished=score.n - 8, accuracy_finished=0.913,
        accuracy_finished_low=0.8, accuracy_finished_high=0.97, drift=None if score.arm == "source" else drift,
        cut_early=2, lost=None if score.arm == "source" else lost, odd_finish={"content_filter": 1},
    )  # fmt: skip


def _compare(run_dir: Path, evaluations: dict[str, Evaluation]) -> Comparison:
    tasks = []
    for arm in ARMS[1:]:
        for task, name in TASKS:
            base, other = (np.load(run_dir / f".{a}-{task}-{name}.npy") for a in ("source", arm))
            lost, gained = int((base & ~other).sum()), int((~base & other).sum())
            both, n = int((base & other).sum()), ITEMS
            low, high = loss_interval(lost, gained, n)
            recovery = recovery_interval(both + lost, both + gained, lost, n)
            tasks.append(
                TaskComparison(
                    task=task, filter=name, metric="exact_match", baseline="source", candidate=arm, n=n, both=both,
                    lost=lost, gained=gained, neither=n - both - lost - gained, baseline_value=(both + lost) / n,
                    candidate_value=(both + gained) / n, loss_pp=100 * (lost - gained) / n, loss_low_pp=100 * low,
                    loss_high_pp=100 * high, loss_upper95_pp=100 * loss_upper_bound(lost, gained, n),
                    p_loss=mcnemar_exact(lost, gained, "greater"), p_two_sided=mcnemar_exact(lost, gained),
                    recovery_percent=100 * recovery[0], recovery_low_percent=100 * recovery[1],
                    recovery_high_percent=100 * recovery[2], discordance=(lost + gained) / n,
                    mde_pp=100 * minimum_detectable_loss(n, (lost + gained) / n), primary=name != TASKS[1][1],
                    flips=tuple(_flip(task, name, int(i), bool(base[i])) for i in np.flatnonzero(base ^ other)),
                )
            )  # fmt: skip
    for file in run_dir.glob(".*.npy"):
        file.unlink()
    noise = {f"{t.task}|{t.filter}": t.discordance for t in tasks if t.candidate == "source_again"}
    names = sorted({score.samples for evaluation in evaluations.values() for score in evaluation.scores})
    comparison = Comparison(
        baseline="source", noise_arm="source_again", tasks=tuple(tasks), noise_floor=noise,
        sources={name: digest(run_dir / name) for name in names},
    )  # fmt: skip
    records.write_json(run_dir / "comparison.json", comparison)
    return comparison


def _flip(task: str, name: str, item: int, lost: bool) -> Flip:
    crates, each = 3 + item % 7, 4 + item % 5
    start = f"There are {crates} crates with {each} jars each, so there are "
    right, wrong = (f"{start}{crates} * {each} = {n} jars.\n#### {n}" for n in (crates * each, crates * each + crates))
    answers = (right, f"{wrong} {HOSTILE}") if lost else (wrong, right)
    return Flip(
        task=task, filter=name, doc_id=item, direction="lost" if lost else "gained",
        question=f"A shop has {crates} crates. Each holds {each} jars. How many jars are there? {HOSTILE}",
        target=str(crates * each), baseline_answer=answers[0], candidate_answer=answers[1],
    )  # fmt: skip


def _write_lint(run_dir: Path, paths: dict[str, Path]) -> dict[str, LintReport]:
    finding = LintFinding(
        check="uncalibrated-experts", severity="warning", tensor="model.layers.2.mlp.experts.5.up_proj",
        message="no input_scale: activations are scaled per token", fix="calibrate on more prompts",
    )  # fmt: skip
    reports = {}
    for arm, path in {"source": paths["source"], "nvfp4": paths["nvfp4"], "mxfp4_direct": paths["mxfp4"]}.items():
        with open_checkpoint(path) as checkpoint:
            entries = checkpoint.entries()
            reports[arm] = LintReport(
                checkpoint=str(path), dialect=checkpoint.dialect, checks=("missing-companion", "exclude-conflict"),
                findings=(finding,) if arm == "nvfp4" else (), seconds=0.1, tensors=len(entries),
                quantized_tensors=sum(e.quantized for e in entries),
            )  # fmt: skip
        records.write_json(run_dir / "lint" / f"{arm}.json", reports[arm])
    return reports


def _write_servers(run_dir: Path, paths: dict[str, Path]) -> None:
    kinds = {
        "source": ("source", "reference", "bf16", "bf16", "none"),
        "source_again": ("source", "reference", "bf16", "bf16", "none"),
        "nvfp4": ("nvfp4", "emulation", "nvfp4", "nvfp4", "dynamic_per_token"),
        "nvfp4_to_mxfp4": ("nvfp4", "requant", "mxfp4", "mxfp4", "dynamic_per_block"),
        "mxfp4_direct": ("mxfp4", "emulation", "mxfp4", "mxfp4", "dynamic_per_block"),
    }
    for arm, (name, backend, weights, activations, scale) in kinds.items():
        with open_checkpoint(paths[name]) as checkpoint:
            size, fingerprint = checkpoint.total_bytes(), checkpoint.fingerprint()
        record = ServerRecord(
            arm=arm, engine="vllm", base_url="http://127.0.0.1:8001/v1", model=arm, checkpoint=f"checkpoints/{name}",
            backend=backend, weight_format=weights, activation_format=activations, activation_scale=scale,
            kv_cache_dtype="auto", dtype="bfloat16", engine_version="0.32.0", fingerprint=fingerprint, ready_s=21.0,
            load_s=0.9, peak_rss_bytes=2_400_000_000, weight_bytes=size,
            command=("vllm", "serve", f"checkpoints/{name}", "--load-format", "workbench", "--port", "8001"),
        )  # fmt: skip
        records.write_json(run_dir / "server" / f"{arm}.json", record)


def _write_divergence(run_dir: Path) -> None:
    """As `workbench kld --json` writes it."""
    bounds = [(0.0123, 0.0207), (0.0031, 0.0052), (0.141, 0.263), (0.527, 0.914)]
    mean, median, p99, p999 = (
        Bounded(
            lower=low, upper=high, lower_ci_low=0.9 * low, lower_ci_high=1.1 * low, upper_ci_low=0.9 * high,
            upper_ci_high=1.1 * high,
        )
        for low, high in bounds
    )  # fmt: skip
    record = Divergence(
        reference="source", arm="nvfp4", k=20, windows=32, positions=16352, mean=mean, median=median, p99=p99,
        p999=p999, floor_nats=103.28, tail_mass_reference=0.011, tail_mass_arm=0.012, same_top1=0.9614,
        same_top1_low=0.957, same_top1_high=0.9655, delta_p_mean_pp=-0.214, delta_p_mean_low_pp=-0.301,
        delta_p_mean_high_pp=-0.127, text_fingerprint="5be1f00d22c3", seconds=61.0,
    )  # fmt: skip
    records.write_json(run_dir / "eval" / "nvfp4" / "kld.json", record)


def _write_manifest(run_dir: Path, paths: dict[str, Path]) -> None:
    described = {}
    for name, path in paths.items():
        with open_checkpoint(path) as checkpoint:
            described[name] = {"dialect": checkpoint.dialect, "fingerprint": checkpoint.fingerprint()}
    manifest = Manifest(
        experiment="kimi_requant", started="2026-10-01T12:00:00+00:00", code_version="0.1.0", code_commit="",
        command=("python", "-m", "workbench.run", "experiment=kimi_requant", "eval=[gsm8k_mini,mmlu_pro_mini]"),
        python=sys.version.split()[0], platform="Linux", cpu="a sample machine", cpu_count=2,
        memory_bytes=24 * 2**30, gpus=(), packages={"torch": torch.__version__, "numpy": np.__version__},
        checkpoints=described, seeds={"run": 0}, stage_seconds={"lint": 0.4, "analyze": 12.0, "evaluate": 312.0},
    )  # fmt: skip
    records.write_json(run_dir / "manifest.json", manifest)
    arms = "\n".join(f"  {arm}: {{}}" for arm in ARMS)
    records.write_text(run_dir / "config.yaml", f"name: kimi_requant\nbaseline: source\narms:\n{arms}\n")


if __name__ == "__main__":
    make_sample_run(Path(sys.argv[1]))
