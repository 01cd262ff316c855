"""Measure a mini model in process: greedy accuracy on held-out problems in lm-eval's prompts, and loss on held-out
English.

    python -m workbench.mini_models.measure            # the shipped model through vLLM, 1,000 problems of each kind

The numbers of the model card come from the command above. The trainer uses the same prompts and the same filters
through transformers.
"""

import argparse
import json
import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .problems import (
    Problem,
    gsm8k_answer,
    gsm8k_problems,
    gsm8k_prompt,
    mmlu_pro_problems,
    mmlu_pro_prompt,
    mmlu_pro_shots,
)

SHOTS = 5
# lm-eval 0.4.13, tasks/gsm8k/gsm8k.yaml and tasks/mmlu_pro/_default_template_yaml: stop strings and filters.
STOP = {"gsm8k": ["Question:", "</s>", "<|im_end|>"], "mmlu_pro": ["Question:"]}
FILTERS = {
    "gsm8k": {"strict_match": r"#### (\-?[0-9\.\,]+)", "flexible_extract": r"(-?[$0-9.,]{2,})|(-?[0-9]+)"},
    "mmlu_pro": {"custom_extract": r"answer is \(?([ABCDEFGHIJ])\)?"},
}
MAX_NEW_TOKENS = 256


def prompts_and_gold(task: str, n: int) -> tuple[list[str], list[str]]:
    """`n` held-out five-shot prompts of "gsm8k" or "mmlu_pro" and their right answers."""
    if task == "gsm8k":
        pool, rng = gsm8k_problems(20, split="train"), random.Random("shots")
        problems = gsm8k_problems(n, split="test")
        return [gsm8k_prompt(p, rng.sample(pool, SHOTS)) for p in problems], [gsm8k_answer(p) for p in problems]
    problems = mmlu_pro_problems(n, split="test")
    shots: dict[str, list[Problem]] = {p["category"]: [] for p in problems}
    shots = {category: mmlu_pro_shots(category, SHOTS) for category in shots}
    return [mmlu_pro_prompt(p, shots[p["category"]]) for p in problems], [p["answer"] for p in problems]


def score(task: str, texts: list[str], gold: list[str]) -> dict[str, float]:
    """Exact match under each of the task's filters, as a share; texts are cut at the stop strings first."""
    cut = [_cut(text, STOP[task]) for text in texts]
    return {
        name: sum(_extract(name, pattern, t) == g for t, g in zip(cut, gold, strict=True)) / len(gold)
        for name, pattern in FILTERS[task].items()
    }


def greedy_accuracy(model: Any, tokenizer: Any, task: str, n: int, batch: int = 200) -> dict[str, Any]:
    """Greedy accuracy of a transformers model; batches are padded on the left. Also counts answers that did not
    stop."""
    from .tokenizer import EOS_ID, IM_END_ID, PAD_ID

    prompts, gold = prompts_and_gold(task, n)
    device = next(model.parameters()).device
    texts: list[str] = []
    for first in range(0, n, batch):
        encoded = [tokenizer.encode(p).ids for p in prompts[first : first + batch]]
        longest = max(map(len, encoded))
        ids = torch.tensor([[PAD_ID] * (longest - len(e)) + e for e in encoded], device=device)
        with torch.no_grad():
            out = model.generate(
                input_ids=ids,
                attention_mask=(ids != PAD_ID).long(),
                max_new_tokens=MAX_NEW_TOKENS,
                do_sample=False,
                pad_token_id=PAD_ID,
                eos_token_id=[EOS_ID, IM_END_ID],
            )
        texts += [tokenizer.decode(row.tolist()) for row in out[:, longest:]]
    unstopped = sum("Question:" not in text and len(tokenizer.encode(text).ids) > MAX_NEW_TOKENS - 4 for text in texts)
    return {"n": n, **score(task, texts, gold), "unstopped": unstopped, "sample": texts[0][:300]}


@contextmanager
def quantized(model: Any, arm: str) -> Iterator[None]:
    """Inside, the model computes as `arm` ("nvfp4" or "nvfp4_to_mxfp4") does: the weights and inputs of the routed
    experts, or of a dense model's projections, are rounded. Each matrix has a global scale of its own; gate and up of
    an expert, which are stored as one, share it."""
    from workbench.kernels import reference as kernels

    from .model import change_linears, mixture_layers, unchanged

    def nvfp4(w_nk: Tensor) -> Tensor:
        if w_nk.dim() == 3:
            return torch.stack([nvfp4(w) for w in w_nk])
        return kernels.nvfp4_dequantize(*kernels.nvfp4_quantize(w_nk)).to(w_nk.dtype)

    def nvfp4_to_mxfp4(w_nk: Tensor) -> Tensor:
        return kernels.mxfp4_dequantize(*kernels.mxfp4_quantize(nvfp4(w_nk))).to(w_nk.dtype)

    on_weight, on_input = {
        "nvfp4": (nvfp4, kernels.nvfp4_qdq_activation),
        "nvfp4_to_mxfp4": (nvfp4_to_mxfp4, kernels.mxfp4_qdq_activation),
    }[arm]
    rounded = lru_cache(maxsize=None)(on_weight)  # a weight is rounded once, not at every token
    layers = mixture_layers(model)
    try:
        if layers:
            for layer in layers:
                layer.on_weight, layer.on_input = rounded, on_input
        else:
            change_linears(model, rounded, on_input)
        yield
    finally:
        change_linears(model, unchanged, unchanged)


def english_loss(model: Any, tokens: Any, context: int, rows: int = 64) -> float:
    """Mean loss on held-out English, in nats a token."""
    device = next(model.parameters()).device
    rows = min(rows, len(tokens) // context)
    ids = torch.tensor(tokens[: rows * context].astype("int64"), device=device).view(rows, context)
    with torch.no_grad():
        losses = [
            F.cross_entropy(model(input_ids=row[None], use_cache=False).logits[0, :-1].float(), row[1:]).item()
            for row in ids
        ]
    return sum(losses) / len(losses)


def main() -> None:
    """Measure a checkpoint through vLLM and print a table."""
    from . import model_path

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(model_path()))
    parser.add_argument("-n", type=int, default=1000)
    options = parser.parse_args()

    from vllm import LLM, SamplingParams

    llm = LLM(model=options.model, dtype="bfloat16", enforce_eager=True, max_model_len=2048)
    for task in ("gsm8k", "mmlu_pro"):
        prompts, gold = prompts_and_gold(task, options.n)
        sampling = SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS, stop=STOP[task])
        begin = time.monotonic()
        outputs = [out.outputs[0] for out in llm.generate(prompts, sampling)]
        result: dict[str, Any] = score(task, [out.text for out in outputs], gold)
        result["answers_cut_at_the_limit"] = sum(out.finish_reason == "length" for out in outputs)
        result["seconds"] = round(time.monotonic() - begin, 1)
        print(json.dumps({"task": task, "n": options.n, **result}), flush=True)


def _extract(name: str, pattern: str, text: str) -> str:
    """The first match, or the last for `flexible_extract`, without lm-eval's ignored characters."""
    found = re.findall(pattern, text)
    if not found:
        return "[invalid]"
    match = found[-1] if name == "flexible_extract" else found[0]
    value = match if isinstance(match, str) else next(part for part in match if part)
    return re.sub(r"[,$]|\.$", "", value)


def _cut(text: str, stops: list[str]) -> str:
    for stop in stops:
        text = text.split(stop)[0]
    return text


if __name__ == "__main__":
    main()
