"""Train a mini model from random weights on one GPU, export it, and measure it.

    python -m workbench.mini_models.train --english TEXTS --out FOLDER --seconds 580

The clock decides, not a step count: the learning rate and the curriculum follow the share of the time that has
passed, so a run always ends with an annealed, exported checkpoint inside its limit. Three sources are mixed in every
batch: English, problems, and option drills that fade out. `--init CHECKPOINT` trains on from an exported checkpoint
with its tokenizer. `--smoke` runs everything on a CPU in a minute, at a size that learns nothing.

What it costs: one H200 for ten minutes. The result is not the same bits twice, since the number of steps is not fixed.
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from . import measure
from .corpus import drill_document, problem_document
from .model import (
    ARCHITECTURES,
    build_model,
    change_linears,
    export,
    load,
    mixture_layers,
    unchanged,
    use_flash_attention,
    with_noise,
)
from .tokenizer import BOS_ID, EOS_ID, SPECIAL_TOKENS, VOCAB_SIZE, save_tokenizer, train_tokenizer

HELD_OUT_ENGLISH_TOKENS = 150_000
ENGLISH_SHARE = 0.3
ENGLISH_NOISE = 0.2  # share of English input tokens replaced at random: the books are read many times over
BALANCE_RATE = 1e-3  # DeepSeek-V3's step of the router's bias (arXiv 2412.19437, 4.2)
WARMUP_STEPS = 100
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}


@dataclass(frozen=True)
class Settings:
    """What a run is made of. Sizes in tokens, times in seconds."""

    english: Path
    out: Path
    init: Path | None
    seconds: float
    reserve_s: float = 130.0  # kept for export and measurement
    context: int = 2048
    batch: int = 64
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    problem_documents: int = 560_000
    drill_documents: int = 80_000
    measured: int = 300
    noise_db: float = math.inf
    noise_from: float = 0.0  # share of the training time without noise
    smoke: bool = False
    model: str = "mini_kimi"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--english", type=Path, required=True, help="folder of .txt files")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--model", default=Settings.model, choices=list(ARCHITECTURES))
    parser.add_argument("--init", type=Path, help="exported checkpoint to train on from")
    parser.add_argument("--seconds", type=float, default=580.0, help="limit of the whole run")
    parser.add_argument("--learning-rate", type=float, default=Settings.learning_rate)
    parser.add_argument("--batch", type=int, default=Settings.batch)
    parser.add_argument("--problem-documents", type=int, default=Settings.problem_documents)
    parser.add_argument("--drill-documents", type=int, default=Settings.drill_documents)
    parser.add_argument(
        "--noise-db", type=float, default=Settings.noise_db, help="train the MLPs under noise this far below the signal"
    )
    parser.add_argument(
        "--noise-from", type=float, default=Settings.noise_from, help="share of the training that passes without it"
    )
    parser.add_argument("--smoke", action="store_true")
    options = vars(parser.parse_args())
    if options["smoke"]:
        small = {"reserve_s": 5.0, "context": 256, "problem_documents": 400, "drill_documents": 100, "measured": 4}
        options |= small | {"seconds": 40.0, "batch": 4}
    run(Settings(**options))


def run(settings: Settings) -> None:
    """Tokenizer, corpus, training, export, measurement; a short table last."""
    start = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    texts = [path.read_text(encoding="utf-8") for path in sorted(settings.english.glob("*.txt"))]
    tokenizer = _tokenizer(settings, texts)
    english, held_out = _encode_english(tokenizer, texts)
    problems = _encode_documents(tokenizer, problem_document, settings.problem_documents)
    drills = _encode_documents(tokenizer, drill_document, settings.drill_documents)
    sources = [torch.from_numpy(tokens.astype(np.int32)).to(device) for tokens in (english, problems, drills)]
    sizes = " ".join(
        f"{name} {len(t) / 1e6:.1f} M" for name, t in zip(("english", "problems", "drills"), sources, strict=True)
    )
    print(f"tokens: {sizes}; {time.monotonic() - start:.0f} s", flush=True)

    torch.manual_seed(0)
    use_flash_attention()
    model = build_model(settings.model, **(TINY if settings.smoke else {})).to(device)
    if settings.init:
        load(model, settings.init)
    summary = _train(model, sources, settings, deadline=start + settings.seconds - settings.reserve_s)
    change_linears(model, unchanged, unchanged)

    export(model, settings.out)
    save_tokenizer(tokenizer, settings.out, max_length=model.config.max_position_embeddings)
    summary["finished"] = datetime.now(UTC).strftime("%Y-%m-%d")
    summary["device"] = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    summary["corpus_tokens"] = {"english": len(english), "problems": len(problems), "drills": len(drills)}
    _write(settings.out / "training.json", summary)

    for parameter in model.parameters():  # not the buffers: the router's bias and the rotary frequencies stay float32
        parameter.data = parameter.data.to(torch.bfloat16)
    model.eval()
    summary["held_out_english_nats_per_token"] = measure.english_loss(model, held_out, settings.context)
    _write(settings.out / "training.json", summary)
    for task in ("gsm8k", "mmlu_pro"):
        summary[task] = measure.greedy_accuracy(model, tokenizer, task, settings.measured)
        _write(settings.out / "training.json", summary)
        for arm in ("nvfp4", "nvfp4_to_mxfp4"):
            with measure.quantized(model, arm):
                summary[f"{task}/{arm}"] = measure.greedy_accuracy(model, tokenizer, task, settings.measured)
            _write(settings.out / "training.json", summary)
    print(json.dumps(summary, indent=2), flush=True)
    print(f"done in {time.monotonic() - start:.0f} s", flush=True)


def _train(model: Any, sources: Sequence[Tensor], settings: Settings, *, deadline: float) -> dict[str, Any]:
    """AdamW, cosine over the share of time that has passed; returns what was done."""
    device = next(model.parameters()).device
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )
    layers = mixture_layers(model)

    def loss_of(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(input_ids=inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        return loss, torch.stack([layer.load for layer in layers]) if layers else loss.new_zeros(0, 1)

    step_loss = torch.compile(loss_of) if device.type == "cuda" else loss_of
    rng = np.random.default_rng(0 if settings.init is None else 1)
    model.train()
    begin, progress, step, rows_seen = time.monotonic(), 0.0, 0, np.zeros(3, dtype=np.int64)
    load_sum: Any = 0.0
    quiet = not math.isinf(settings.noise_db)  # a large model's slack absorbs rounding; one this small must learn to
    while progress < 1.0:
        if quiet and progress >= settings.noise_from:
            noisy = partial(with_noise, snr_db=settings.noise_db)
            change_linears(model, noisy, noisy)
            step_loss, quiet = torch.compile(loss_of) if device.type == "cuda" else loss_of, False
        rows = _rows(settings, progress)
        tokens = torch.cat([_windows(t, n, settings.context, rng) for t, n in zip(sources, rows, strict=True)])
        rate = settings.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / WARMUP_STEPS)
        inputs = tokens[:, :-1].clone()
        _add_noise(inputs[: rows[0]], ENGLISH_NOISE)
        loss, loads = step_loss(inputs, tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for layer, load_e in zip(layers, loads, strict=True):
            layer.gate.e_score_correction_bias.add_(BALANCE_RATE * torch.sign(load_e.mean() - load_e))
        step, rows_seen = step + 1, rows_seen + rows
        if progress > 0.9:
            load_sum = load_sum + loads
        if step == 3:  # the compiler's time is not training time
            _wait(device)
            begin = time.monotonic()
        if step % 10 == 0:
            _wait(device)
            progress = (time.monotonic() - begin) / max(1.0, deadline - begin)
        if step % 250 == 0:
            spread = (loads.max(1).values / loads.mean(1)).tolist()
            print(
                f"step {step} loss {loss.item():.3f} progress {progress:.3f} rows {list(map(int, rows))} load max/mean "
                + " ".join(f"{s:.2f}" for s in spread),
                flush=True,
            )
    summary: dict[str, Any] = {
        "steps": step,
        "train_seconds": round(time.monotonic() - begin, 1),
        "tokens": int(rows_seen.sum()) * settings.context,
        "tokens_by_source": dict(
            zip(("english", "problems", "drills"), (int(n) * settings.context for n in rows_seen), strict=True)
        ),
        "batch": settings.batch,
        "context": settings.context,
        "learning_rate": settings.learning_rate,
        "weight_decay": settings.weight_decay,
        "noise_db": None if math.isinf(settings.noise_db) else settings.noise_db,
        "noise_from": settings.noise_from,
        "last_loss": round(loss.item(), 4),
    }
    if layers:
        shares = load_sum / load_sum.sum(1, keepdim=True).clamp(min=1e-9)
        summary["expert_token_share_min_max"] = [round(shares.min().item(), 4), round(shares.max().item(), 4)]
    return summary


def _rows(settings: Settings, progress: float) -> np.ndarray:
    """Batch rows from English, problems and drills: the drills fall from a quarter to a sixteenth by mid-run."""
    first = 1 / 4 if settings.init is None else 1 / 16
    drill_share = first + (1 / 16 - first) * min(1.0, max(0.0, (progress - 0.1) / 0.4))
    english, drills = round(settings.batch * ENGLISH_SHARE), max(1, round(settings.batch * drill_share))
    return np.array([english, settings.batch - english - drills, drills])


def _windows(tokens: Tensor, n: int, context: int, rng: np.random.Generator) -> Tensor:
    """`n` windows of `context` + 1 tokens at random places."""
    starts = torch.from_numpy(rng.integers(0, len(tokens) - context - 1, n)).to(tokens.device)
    return tokens[starts[:, None] + torch.arange(context + 1, device=tokens.device)].long()


def _add_noise(inputs: Tensor, share: float) -> None:
    """Replace a share of the tokens by random ones, in place."""
    hit = torch.rand(inputs.shape, device=inputs.device) < share
    inputs.copy_(torch.where(hit, torch.randint_like(inputs, len(SPECIAL_TOKENS), VOCAB_SIZE), inputs))


def _tokenizer(settings: Settings, texts: list[str]) -> Tokenizer:
    if settings.init:
        return Tokenizer.from_file(str(settings.init / "tokenizer.json"))
    english = [text[i : i + 4000] for text in texts for i in range(0, min(len(text), 240_000), 4000)]
    first = 10**9  # documents that the corpus does not hold
    return train_tokenizer([problem_document(first + i) for i in range(2000)] + english)


def _encode_english(tokenizer: Tokenizer, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """All texts as one stream of tokens, pieces of 20,000 characters being a document each; the end is held out."""
    pieces = [text[i : i + 20_000] for text in texts for i in range(0, len(text), 20_000)]
    random.Random("english").shuffle(pieces)
    ids = [token for e in tokenizer.encode_batch(pieces) for token in (BOS_ID, *e.ids, EOS_ID)]
    held_out = min(HELD_OUT_ENGLISH_TOKENS, len(ids) // 10)
    tokens = np.array(ids, dtype=np.uint16)
    return tokens[:-held_out], tokens[-held_out:]


def _encode_documents(tokenizer: Tokenizer, document: Callable[[int], str], count: int) -> np.ndarray:
    """Documents 0 to `count` - 1 as one stream of tokens, made by all cores."""
    assert VOCAB_SIZE <= 1 << 16
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    cores = os.cpu_count() or 1
    slices = [(tokenizer.to_str(), document, i, min(i + 2000, count)) for i in range(0, count, 2000)]
    with multiprocessing.get_context("fork").Pool(cores) as pool:
        return np.concatenate(pool.starmap(_encode_slice, slices, chunksize=1))


def _encode_slice(tokenizer: str, document: Callable[[int], str], first: int, last: int) -> np.ndarray:
    encoder = Tokenizer.from_str(tokenizer)
    encoded = encoder.encode_batch([document(i) for i in range(first, last)])
    return np.array([token for e in encoded for token in (BOS_ID, *e.ids, EOS_ID)], dtype=np.uint16)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _write(path: Path, summary: dict[str, Any]) -> None:
    path.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
