"""Runs a list of engine jobs (vLLM in process) and saves what the tests compare.

    python engine_jobs.py jobs.json results.pt

vLLM is imported once; each job then runs in a fork of its own, as a server does: vLLM 0.32's CPU worker cannot start in
a process in which Numba was used before. Ranks of a parallel job are forks too.

A job: {"key", "settings" (PluginSettings as a dict), "dtype", "prompts", "new_tokens", "activations" (file or ""),
"stock" (true: vLLM's own path for the checkpoint's quant_method), "parallel" (the engine's arguments for more ranks)};
or one of numerics_jobs.py, under "numerics".
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # describe_memory is sent to the ranks of a parallel job
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Eager engines still compile a helper that counts log-probabilities: a minute of C++, anew on every fresh machine.
    "TORCHDYNAMO_DISABLE": "1",
}

import torch


def main(jobs_path: str, results_path: str) -> None:
    # Once, for all forks (`vllm` alone imports little). A class that is registered is not looked for in a process.
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import LLM, ModelRegistry  # noqa: F401
    from vllm.model_executor.models import deepseek_v2, qwen3, qwen3_moe

    for model in (deepseek_v2.DeepseekV3ForCausalLM, qwen3.Qwen3ForCausalLM, qwen3_moe.Qwen3MoeForCausalLM):
        ModelRegistry.register_model(model.__name__, model)

    results = {}
    with open(jobs_path) as stream:
        jobs = json.load(stream)
    for job in jobs:
        path = f"{results_path}.{job['key']}"
        child = multiprocessing.get_context("fork").Process(target=run_and_save, args=(job, path))
        child.start()
        child.join()
        results[job["key"]] = torch.load(path, weights_only=False)
    torch.save(results, results_path)


def run_and_save(job: dict, path: str) -> None:
    try:
        result = run_numerics(job["numerics"]) if "numerics" in job else run_job(job)
    except Exception as error:  # a job that must fail is a test too
        result = {"error": f"{type(error).__name__}: {error}", "fix": getattr(error, "fix", "")}
    torch.save(result, path)


def run_numerics(job: dict) -> dict:
    import numerics_jobs

    numerics_jobs.run(job)
    return {}


def run_job(job: dict) -> dict:
    from vllm import LLM, SamplingParams

    from workbench.serving import command
    from workbench.serving.vllm_plugin.settings import PluginSettings

    if job.get("parallel"):
        from vllm.v1.executor import multiproc_executor

        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else every rank wants a NUMA node of its own
        # vLLM's CPU platform insists on "spawn", by which each rank would import everything anew.
        multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    settings = PluginSettings.from_dict(job["settings"])
    exact_mla = command.uses_mla(settings.checkpoint) and job["dtype"] != "bfloat16"
    if job.get("stock"):
        _offer_emulation_on_cpu()
        ours = {}
    else:
        ours = {
            "load_format": "workbench",
            "model_loader_extra_config": settings.to_dict(),
            "hf_overrides": command.hf_overrides(settings),
        }
    llm = LLM(
        model=settings.checkpoint,
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        **ours,
        **job.get("parallel", {}),
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=512,
        max_num_seqs=8,
        kv_cache_memory_bytes=64 << 20,
        attention_backend="CPU_MLA" if exact_mla else None,
    )
    ranks = llm.apply_model(describe_memory)
    recorder = llm.llm_engine.vllm_config.quant_config.recorder if job.get("activations") else None
    if recorder is not None:
        recorder.limit, recorder.moments, recorder.full_bytes = 4096, "full", 1 << 30
        recorder.enabled = True
    new_tokens = job.get("new_tokens", 1)
    sampling = SamplingParams(
        max_tokens=new_tokens, temperature=0, prompt_logprobs=1, logprobs=1, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate([{"prompt_token_ids": p} for p in job["prompts"]], sampling, use_tqdm=False)
    after = llm.apply_model(describe_memory)[0]
    if recorder is not None:
        from pathlib import Path

        config = llm.llm_engine.vllm_config.quant_config
        recorder.write(Path(job["activations"]), expected=list(config.capturable), metadata={})
    prompt, generated = [], []
    for output in outputs:
        for token, entry in list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[1:]:
            prompt.append(entry[token].logprob)
        for token, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
            generated.append((token, entry[token].logprob))
    return {
        "prompt": torch.tensor(prompt, dtype=torch.float64),
        "generated": generated,
        "before": ranks[0],
        "ranks": ranks,
        "after": after,
    }


def _offer_emulation_on_cpu() -> None:
    """vLLM's own NVFP4 emulation is plain PyTorch, but its table of kernels has no row for a CPU."""
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    linear._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CPU] = [linear.EmulationNvFp4LinearKernel]


def describe_memory(model) -> dict:
    """Parameters of the packed modules, every module's method, every dense tensor alive in this process by shape."""
    packed, methods = {}, {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        methods[name] = type(method).__name__
        if type(method).__name__ in ("PackedLinearMethod", "PackedMoEMethod"):
            held = {n: _bytes(p) for n, p in module.named_parameters(recurse=False) if "bias" not in n}
            extra = [n for n, b in module.named_buffers(recurse=False) if b is not None and b.is_floating_point()]
            packed[name] = {"parameters": held, "float_buffers": extra}
    dense = []
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor):  # isinstance would follow dead weak references
            continue
        if thing.dtype in (torch.bfloat16, torch.float32) and thing.dim() >= 2:
            dense.append(tuple(int(n) for n in thing.shape if isinstance(n, int)))
    return {"packed": packed, "methods": methods, "dense_shapes": dense}


def _bytes(parameter: torch.Tensor) -> torch.Tensor:
    """A plain uint8 copy (vLLM's parameter classes cannot be pickled)."""
    plain = parameter.detach().as_subclass(torch.Tensor).contiguous().view(torch.uint8)
    return torch.from_numpy(plain.numpy().copy())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
