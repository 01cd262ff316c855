"""What the modules of a loaded model are: their methods, kernels and stored tensors, and the probe of each.

    layers = inspect_model(model, references, dtype=torch.bfloat16)     # inside vLLM's worker

Everything is read off the loaded objects: classes, not the configuration that asked for them. Plain data comes back, a
mapping for each module that computes with weights (linear layers, experts, the output head) or holds a cache.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers import linear as vllm_linear
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from workbench.errors import CheckpointError

from .numerics_probe import Facts, Part, merge_facts, probe_columns, probe_expert, probe_linear
from .numerics_reference import AT_LOAD, References

SAMPLED_EXPERTS = 3  # of a layer: the first, the last, and one between that moves from layer to layer
_BOOKKEEPING = ("workspace", "expert_map", "_map", "bias")


def inspect_model(model: nn.Module, references: References | None, *, dtype: torch.dtype) -> list[dict[str, Any]]:
    """An entry for each module: name, kind (linear, experts, head, embedding, attention), method, kernel, storage,
    modules (the checkpoint's), sampled (experts), codes (of those: "equal", "differ" or ""), not_probed (why, "" where
    it was), and the fields of `Facts`.

    references: None where no checkpoint was given; then only the inputs' rounding is probed. Nothing of the model is
    changed. A module whose probe fails is entered with the reason.
    """
    layers: list[dict[str, Any]] = []
    for name, module in model.named_modules():
        kind = _kind(module)
        if not kind:
            continue
        facts, codes = Facts(), ""
        sampled: list[int] = []
        why = {"attention": "it has no weights", "embedding": "its rows are looked up, not multiplied"}.get(kind, "")
        if not why:
            try:
                if kind == "experts":
                    facts, sampled, codes = _probe_experts(name, module, references, dtype, len(layers))
                else:
                    facts = _probe_linear(name, module, references, dtype)
            except Exception as error:  # a method of anyone's: the card says what it raised, and the server goes on
                why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
        layers.append(
            {
                "name": name,
                "kind": kind,
                "method": describe_method(module),
                "kernel": describe_kernel(module),
                "storage": describe_storage(module),
                "modules": references.modules(name) if references is not None else [],
                "sampled": sampled,
                "codes": codes,
                "not_probed": why,
                **dataclasses.asdict(facts),
            }
        )
    return layers


def describe_method(module: nn.Module) -> str:
    """The class that runs the module, and where the scheme is a class of its own (compressed-tensors, Quark), that."""
    method = getattr(module, "quant_method", None)
    if method is None:
        return type(module).__name__
    scheme = next((s for holder in (module, method) if (s := getattr(holder, "scheme", None)) is not None), None)
    said = [type(method).__name__]
    if scheme is not None and not isinstance(scheme, str):
        said.append(type(scheme).__name__)
    return "/".join(said)


def describe_kernel(module: nn.Module) -> str:
    """Kernel classes and backends that the method holds, e.g. "MarlinNvFp4LinearKernel"; "" where none shows."""
    method = getattr(module, "quant_method", None)
    backend = getattr(module, "attn_backend", None)
    if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
        return ""
    if method is None or backend is not None:
        return str(backend.get_name()) if backend is not None and hasattr(backend, "get_name") else ""
    describe = getattr(method, "describe", None)
    if callable(describe) and (own := describe().get("kernel")):
        return str(own)
    found: dict[str, None] = {}
    for holder in (method, getattr(module, "scheme", None), getattr(method, "scheme", None)):
        for name, value in _attributes(holder):
            if (said := _kernel_name(name, value)) is not None:
                found[said] = None
    gemm = getattr(module, "cpu_linear", None)  # what vLLM chose for an unquantized layer on a CPU
    if not found and gemm is not None:
        gemm = gemm.func if isinstance(gemm, functools.partial) else gemm
        said = getattr(gemm, "__qualname__", type(gemm).__name__).removesuffix(".<locals>.<lambda>")
        found["torch linear" if gemm is torch.nn.functional.linear else said] = None
    return ", ".join(found)


def describe_storage(module: nn.Module) -> str:
    """Dtypes of the module's tensors by name, "weight uint8, weight_scale float8_e4m3fn"; of attention, the cache's."""
    if (cache := getattr(module, "kv_cache_dtype", None)) is not None:
        return f"cache {cache}"
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    named = {
        name: str(tensor.dtype).removeprefix("torch.")
        for name, tensor in tensors
        if tensor.numel() and not name.endswith(_BOOKKEEPING)
    }
    return ", ".join(f"{name} {dtype}" for name, dtype in named.items())


# ---- private ---------------------------------------------------------------------------------------------------------


def _kind(module: nn.Module) -> str:
    if isinstance(module, RoutedExperts):
        return "experts"
    if isinstance(module, LinearBase):
        return "linear"
    if isinstance(module, ParallelLMHead):
        return "head"
    if isinstance(module, VocabParallelEmbedding):
        return "embedding"
    return "attention" if hasattr(module, "kv_cache_dtype") and hasattr(module, "attn_backend") else ""


def _attributes(holder: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, and what the kernels that it holds are made of (a modular kernel's experts)."""
    for name, value in vars(holder).items() if hasattr(holder, "__dict__") else ():
        yield name, value
        if type(value).__name__.endswith("Kernel") and hasattr(value, "__dict__"):
            yield from vars(value).items()


def _kernel_name(name: str, value: Any) -> str | None:
    if isinstance(value, enum.Enum):
        return f"{name.removesuffix('_backend')} {value.name.lower()}" if "backend" in name else None
    if isinstance(value, type):
        return value.__name__ if name.endswith(("experts_cls", "kernel_cls")) else None
    kind = type(value).__name__
    ends = ("Kernel", "Experts", "PrepareAndFinalize", "LinearOp")
    return kind if kind.endswith(ends) or ("Experts" in kind and "Config" not in kind) else None


def _probe_linear(name: str, layer: Any, references: References | None, dtype: torch.dtype) -> Facts:
    head = isinstance(layer, ParallelLMHead)
    whole = layer.embedding_dim if head else layer.input_size
    k = int(getattr(layer, "input_size_per_partition", None) or whole)
    parts: list[Part] = []
    unknown: CheckpointError | None = None
    if references is not None:
        try:
            parts = references.linear(name, layer, probe_columns(k))
        except CheckpointError as error:
            unknown = error
    run = _runner(layer)
    facts = probe_linear(run, k=k, dtype=_input_dtype(layer, dtype), device=_device(layer), parts=parts)
    return dataclasses.replace(facts, match=f"not compared: {unknown.message}") if unknown else facts


def _runner(layer: Any) -> Callable[[Tensor], Tensor]:
    """The layer's own product, without its bias. A layer class with a forward of its own is asked through it, since it
    may pass its method by."""
    method: Any = layer.quant_method
    own = type(layer).forward
    if own.__module__ == vllm_linear.__name__ or isinstance(layer, ParallelLMHead) or _has_bias(layer):
        return lambda x: method.apply(layer, x, None)

    def through(x: Tensor) -> Tensor:
        y = layer(x)
        product: Tensor = y[0] if isinstance(y, tuple) else y
        return product

    return through


def _has_bias(layer: nn.Module) -> bool:
    return getattr(layer, "bias", None) is not None


def _input_dtype(layer: nn.Module, dtype: torch.dtype) -> torch.dtype:
    """Routers may hold float32 weights and take float32 inputs."""
    own = getattr(layer, "params_dtype", dtype)
    return own if own in (torch.float32, torch.float16, torch.bfloat16) else dtype


def _device(module: nn.Module) -> torch.device:
    tensors = (*module.parameters(), *module.buffers())
    return tensors[0].device if tensors else torch.device("cpu")


def _probe_experts(
    name: str, layer: Any, references: References | None, dtype: torch.dtype, number: int
) -> tuple[Facts, list[int], str]:
    """Facts of the sampled experts together, their numbers, and whether their codes in memory are the checkpoint's."""
    if references is None or not references.experts(name):
        raise CheckpointError("the checkpoint has no experts of that name to compare with")
    moe = layer.moe_config
    activation = getattr(layer.activation, "value", layer.activation)
    if activation != "silu" or getattr(layer, "swiglu_limit", None) is not None:
        raise CheckpointError(f"the probe knows SiLU-gated experts, these are {activation}")
    if int(moe.dp_size) > 1:
        raise CheckpointError("tokens travel between data-parallel ranks")
    hidden = int(references.hidden(name))
    mine = _local_experts(layer)
    sampled = sorted({mine[0], mine[-1], mine[1 + number % max(1, len(mine) - 2)] if len(mine) > 2 else mine[0]})
    run = _expert_runner(layer, hidden)
    found, codes = [], set()
    for expert in sampled[:SAMPLED_EXPERTS]:
        parts = references.expert(name, layer, expert, probe_columns(hidden))
        found.append(
            probe_expert(
                run,
                expert,
                k=hidden,
                dtype=dtype,
                device=_device(layer),
                parts=parts,
                any_factor=bool(layer.quant_method.is_monolithic),
            )
        )
        codes.add(_compare_codes(layer, mine.index(expert), parts.codes))
    facts = merge_facts(found, [f"expert {e}" for e in sampled])
    same = "" if "" in codes or facts.weights.endswith(AT_LOAD) else "differ" if "differ" in codes else "equal"
    return facts, sampled, same


def _compare_codes(layer: nn.Module, place: int, codes: tuple[Tensor, Tensor] | None) -> str:
    """Whether the expert's codes in memory are the checkpoint's bytes; "" where memory is laid out otherwise."""
    if codes is None:
        return ""
    held = [getattr(layer, name, None) for name in ("w13_weight", "w2_weight")]
    for tensor, stored in zip(held, codes, strict=True):
        if not isinstance(tensor, Tensor) or tensor.shape[1:] != stored.shape or tensor.dtype != stored.dtype:
            return ""
    own = [tensor[place].cpu().view(torch.uint8) for tensor in held if tensor is not None]
    return "equal" if all(torch.equal(a, b.view(torch.uint8)) for a, b in zip(own, codes, strict=True)) else "differ"


def _local_experts(layer: Any) -> list[int]:
    """Global numbers of the experts that this rank holds."""
    if layer.expert_map is None:
        return list(range(int(layer.moe_config.num_experts)))
    return [e for e, local in enumerate(layer.expert_map.tolist()) if local >= 0]


def _expert_runner(layer: Any, hidden: int) -> Callable[[Tensor, int], Tensor]:
    """The routed experts' output for rows that all choose one expert with weight 1. The other places of the top k go to
    its neighbours with weight 0, since kernels are built for that many."""
    method, moe = layer.quant_method, layer.moe_config
    experts, top_k = int(moe.num_experts), int(moe.experts_per_token)
    width = int(moe.hidden_dim)

    def run(x: Tensor, expert: int) -> Tensor:
        if width > hidden:
            x = torch.nn.functional.pad(x, (0, width - hidden))
        if method.is_monolithic:
            logits = torch.full((x.shape[0], experts), -50.0, dtype=x.dtype, device=x.device)
            logits[:, expert] = 50.0
            y = layer.forward_monolithic(x, router_logits=logits)
        else:
            alone = bool(getattr(layer, "apply_router_weight_on_input", False))
            others = [] if alone else [(expert + i) % experts for i in range(1, top_k)]
            ids = torch.tensor([[expert, *others]] * x.shape[0], device=x.device)
            weights = torch.zeros(ids.shape, dtype=torch.float32, device=x.device)
            weights[:, 0] = 1.0
            ids = ids.to(method.topk_indices_dtype or torch.int32)
            y = layer.forward_modular(x, weights, ids, None, None)
        if not isinstance(y, Tensor):
            raise CheckpointError(f"its output is {type(y).__name__}, left to a later step")
        return y[:, :hidden]

    return run
