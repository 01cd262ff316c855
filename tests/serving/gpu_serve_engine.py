"""What `gpu_serve_check.py` needs for one engine: the workbench made findable, checkpoints, one run, its figures.

Runs in a process of its own (a fork of the check, which has imported vLLM and never touched the GPU), so that an engine
leaves nothing behind for the next one.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def make_importable(folder: Path) -> None:
    """`workbench` with its kernels, and its vLLM plugin, from this checkout where nothing is installed.

    vLLM finds plugins by the metadata of distributions on sys.path, so `folder` gets a *.dist-info that names ours, and
    goes to the front of sys.path and PYTHONPATH (vLLM inspects model classes in a child process).
    """
    whole = importlib.util.find_spec("workbench") and importlib.util.find_spec("workbench.kernels")
    known = {e.name for e in importlib.metadata.entry_points(group="vllm.general_plugins")}
    if whole and "workbench" in known:
        return
    if not whole:
        for name in [m for m in sys.modules if m.split(".")[0] == "workbench"]:
            del sys.modules[name]
        package = folder / "workbench"
        package.mkdir(parents=True)
        for part in (ROOT / "workbench").iterdir():
            (package / part.name).symlink_to(part)
        elsewhere = {"kernels": "kernels", "conf": "conf", "mini_models": "experiments/mini_models"}
        for name, place in elsewhere.items():
            (package / name).symlink_to(ROOT / place)
    info = folder / "quantization_workbench-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: quantization-workbench\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nworkbench = workbench.serving.vllm_plugin:register\n"
    )
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    importlib.invalidate_caches()


# ---- one engine ------------------------------------------------------------------------------------------------------


def run_engine(job: dict[str, Any]) -> dict[str, Any]:
    """Serve job["checkpoint"] and return its figures.

    job: settings (PluginSettings as a dict; None: vLLM's own path), dtype, device, batches, new_tokens, prompts,
    kv_bytes, eager, audit, log, hash (digests of the packed parameters).
    """
    if job["settings"] is None:
        os.environ["VLLM_PLUGINS"] = ""
    if job["dtype"] == "float32" or (job["device"] == "cuda" and "mini" in Path(job["checkpoint"]).name):
        os.environ["VLLM_MLA_DISABLE"] = "1"  # the MLA kernels know 16 bits only, on Hopper heads of 128 only
    from vllm import LLM

    log = Path(job["log"])
    said = log.stat().st_size if log.exists() else 0
    started = time.perf_counter()
    llm = LLM(**_arguments(job))
    figures: dict[str, Any] = {"start_s": time.perf_counter() - started}
    audit = Path(job["audit"])
    if audit.exists():
        figures["audit"] = json.loads(audit.read_text())
    with log.open(errors="replace") as stream:
        stream.seek(said)
        figures |= _from_log(stream.read())
    for batch in job["batches"]:
        speeds = decode_speeds(llm, batch, job["new_tokens"])
        figures[f"tok_s_{batch}"] = statistics.median(speeds)
        figures[f"tok_s_each_{batch}"] = speeds
    if job["prompts"]:
        figures["logprobs"] = prompt_logprobs(llm, job["prompts"])
    if job["hash"]:
        figures["digests"] = llm.apply_model(_digests)[0]
    if job["device"] == "cuda":
        figures["cuda_peak"] = torch.cuda.max_memory_allocated()
    return figures


def _arguments(job: dict[str, Any]) -> dict[str, Any]:
    from workbench.serving import command
    from workbench.serving.vllm_plugin.settings import PluginSettings

    ours: dict[str, Any] = {}
    if job["settings"] is not None:
        settings = PluginSettings.from_dict({**job["settings"], "audit": job["audit"]})
        ours = {
            "load_format": "workbench",
            "model_loader_extra_config": settings.to_dict(),
            "hf_overrides": command.hf_overrides(settings),
        }
    graphs: dict[str, Any] = {"enforce_eager": True}
    if not job["eager"]:
        sizes = sorted({1, 2, 4, 8, 16, 32, *job["batches"]})
        graphs = {"compilation_config": {"cudagraph_capture_sizes": sizes, **job.get("compilation", {})}}
    return {
        "model": job["checkpoint"],
        "skip_tokenizer_init": True,
        "dtype": job["dtype"],
        "enable_prefix_caching": False,
        "max_model_len": 512,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": max([8, *job["batches"]]),
        "kv_cache_memory_bytes": job["kv_bytes"],
        "gpu_memory_utilization": 0.5,  # is refused where less is free, though the line above decides
        **graphs,
        **ours,
    }


def decode_speeds(llm: Any, batch: int, new_tokens: int) -> list[float]:
    """Tokens/s of decoding alone, by each of five pairs of runs, one long and one of a single token."""
    prompts = [{"prompt_token_ids": [3 + (7 * i + j) % 200 for j in range(16)]} for i in range(batch)]

    def run(tokens: int) -> float:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - started

    run(new_tokens)
    return [batch * (new_tokens - 1) / (run(new_tokens) - run(1)) for _ in range(5)]


def prompt_logprobs(llm: Any, prompts: list[list[int]]) -> list[float]:
    """Log-probability of every prompt token after the first, prompts one after the other."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    return [
        round(entry[token].logprob, 6)
        for output in outputs
        for token, entry in list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[1:]
    ]


def _digests(model: torch.nn.Module) -> dict[str, str]:
    """sha256 of the codes and block scales of every packed parameter, by name."""
    found = {}
    for name, module in model.named_modules():
        if type(getattr(module, "quant_method", None)).__name__ in ("PackedLinearMethod", "PackedMoEMethod"):
            for key, value in module.named_parameters(recurse=False):
                if key.endswith(("weight", "weight_scale")):
                    data = value.detach().as_subclass(torch.Tensor).contiguous().view(torch.uint8).cpu().numpy()
                    found[f"{name}.{key}"] = hashlib.sha256(data.tobytes()).hexdigest()[:16]
    return found


def _from_log(text: str) -> dict[str, float]:
    import re

    found = {}
    for key, pattern in (
        ("vllm_weights_s", r"Loading weights took ([\d.]+) seconds"),
        ("vllm_model_gib", r"Model loading took ([\d.]+) GiB"),
        ("vllm_model_s", r"Model loading took [\d.]+ GiB memory and ([\d.]+) seconds"),
    ):
        if match := re.findall(pattern, text):
            found[key] = float(match[-1])
    return found


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def mini_checkpoints(folder: Path) -> dict[str, str]:
    """The shipped mini-kimi, and it in NVFP4 (ModelOpt's layout, dynamic activations)."""
    from workbench.checkpoints.convert import quantize_checkpoint

    source = ROOT / "experiments" / "mini_models" / "mini_kimi"
    nvfp4 = folder / "mini_nvfp4"
    if not nvfp4.exists():
        quantize_checkpoint(source, nvfp4, format="nvfp4", dialect="modelopt")
    return {"bf16": str(source), "nvfp4": str(nvfp4)}


def mini_prompts(count: int = 8, tokens: int = 96) -> list[list[int]]:
    """Solved problems of the kind that the model was trained on, as token ids."""
    from tokenizers import Tokenizer
    from workbench.mini_models.problems import gsm8k_problems, gsm8k_solved

    tokenizer = Tokenizer.from_file(str(ROOT / "experiments" / "mini_models" / "mini_kimi" / "tokenizer.json"))
    texts = ["".join(gsm8k_solved(p) for p in [a, b]) for a, b in _pairs(gsm8k_problems(2 * count, split="test"))]
    return [tokenizer.encode(text).ids[:tokens] for text in texts]


def _pairs(items: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(items[::2], items[1::2], strict=True)


LARGE = {"layers": 14, "hidden": 2048, "inter": 768, "experts": 128, "top": 8, "heads": 32, "kv": 4, "vocab": 32000}
TINY = {"layers": 2, "hidden": 128, "inter": 64, "experts": 8, "top": 2, "heads": 4, "kv": 2, "vocab": 512}


def make_large(folder: Path, size: dict[str, int], device: str) -> dict[str, Any]:
    """A Qwen3-MoE of random weights, written as ModelOpt NVFP4 with input scales; quantized on `device`.

    Every expert has a global scale of its own; gate and up (q, k and v) share theirs, as producers write them. Returns
    {"parameters", "bytes", "seconds"}.
    """
    from workbench.kernels import triton_dispatch as kernels

    from workbench.checkpoints.dialects.base import Written
    from workbench.checkpoints.dialects.modelopt.config import write_config
    from workbench.checkpoints.dialects.modelopt.tensors import write_tensor
    from workbench.checkpoints.writer import CheckpointWriter
    from workbench.formats import QuantizedTensor

    started = time.perf_counter()
    generator = torch.Generator(device).manual_seed(0)
    h, inter, experts, head = size["hidden"], size["inter"], size["experts"], size["hidden"] // size["heads"] * 2
    parameters, modules = 0, []

    def dense(*shape: int) -> torch.Tensor:
        nonlocal parameters
        parameters += torch.Size(shape).numel()
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32) * 0.02

    def packed(names: list[str], rows: int, columns: int, amax: float) -> Iterator[dict[str, torch.Tensor]]:
        w = dense(len(names), rows, columns)
        spread = 1 + torch.arange(len(names), device=device) / (8 * len(names))
        g = (w.abs().amax() / 2688 * spread)[:, None, None]
        codes, scales, _ = kernels.nvfp4_quantize(w, g)
        codes, scales, g = codes.cpu(), scales.cpu(), g.flatten().cpu()
        for i, name in enumerate(names):
            modules.append(name)
            q = QuantizedTensor(
                format="nvfp4",
                codes=codes[i],
                block_scales=scales[i],
                global_scale=g[i],
                shape=(rows, columns),
                input_scale=torch.tensor(amax / 2688),
            )
            yield write_tensor(f"{name}.weight", q)

    with CheckpointWriter(folder) as writer:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            writer.add({name: dense(size["vocab"], h).bfloat16().cpu()})
        writer.add({"model.norm.weight": torch.ones(h, dtype=torch.bfloat16)})
        for layer in range(size["layers"]):
            at = f"model.layers.{layer}"
            norms = {f"{at}.input_layernorm": h, f"{at}.post_attention_layernorm": h}
            norms |= {f"{at}.self_attn.q_norm": head, f"{at}.self_attn.k_norm": head}
            writer.add({f"{n}.weight": torch.ones(width, dtype=torch.bfloat16) for n, width in norms.items()})
            writer.add({f"{at}.mlp.gate.weight": dense(experts, h).bfloat16().cpu()})
            heads = {"q_proj": (size["heads"], h), "k_proj": (size["kv"], h), "v_proj": (size["kv"], h)}
            for name, (count, columns) in heads.items():
                for part in packed([f"{at}.self_attn.{name}"], count * head, columns, 6.0):
                    writer.add(part)
            for part in packed([f"{at}.self_attn.o_proj"], h, size["heads"] * head, 4.0):
                writer.add(part)
            for name, rows, columns in (("gate_proj", inter, h), ("up_proj", inter, h), ("down_proj", h, inter)):
                for part in packed([f"{at}.mlp.experts.{e}.{name}" for e in range(experts)], rows, columns, 6.0):
                    writer.add(part)
        routers = tuple(f"model.layers.{i}.mlp.gate" for i in range(size["layers"]))
        written = Written(
            formats=dict.fromkeys(modules, "nvfp4"),
            excludes=("lm_head", *routers),
            rules={"nvfp4": "amax"},
            static_activations=True,
        )
        for name, value in write_config(_qwen_config(size, head), written).items():
            writer.write_json(name, value)
    size_bytes = sum(f.stat().st_size for f in folder.iterdir())
    return {"parameters": parameters, "bytes": size_bytes, "seconds": time.perf_counter() - started}


def _qwen_config(size: dict[str, int], head: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "hidden_size": size["hidden"],
        "intermediate_size": size["inter"],
        "moe_intermediate_size": size["inter"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["kv"],
        "head_dim": head,
        "num_experts": size["experts"],
        "num_experts_per_tok": size["top"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": size["vocab"],
        "max_position_embeddings": 16384,  # the published load has prompts of 10,240 tokens
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }


@contextlib.contextmanager
def output_to(log: Path) -> Iterator[None]:
    """What this process and its children print goes to `log`."""
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    with log.open("ab") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        for number, fd in enumerate(kept, 1):
            os.dup2(fd, number)
            os.close(fd)
