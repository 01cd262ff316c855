"""Runs an engine in process with the numerics worker; writes the facts that the tests read. For engine_jobs.py.

A job: {"facts" and "audit" (paths), "checkpoint", "backend", "worker" (class)}.
"""

from __future__ import annotations

import json
import os

import torch
from vllm import LLM
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from workbench.serving import command, numerics
from workbench.serving.numerics_worker import NumericsWorker
from workbench.serving.vllm_plugin.settings import PluginSettings


class SilentFallbackWorker(NumericsWorker):
    """A server in which layers run otherwise than everything that describes them says, as a fallback inside an engine
    does: one linear layer weight-only, one on another dense matrix, the experts of a layer weight-only."""

    def compile_or_warm_up_model(self):
        layers = self.get_model().model.layers
        weight_only(layers[0].self_attn.o_proj.quant_method)
        dense(layers[0].mlp.down_proj)
        weight_only(layers[1].mlp.experts.routed_experts.quant_method)
        return super().compile_or_warm_up_model()


def weight_only(method) -> None:
    """The method goes on to say what it was asked for."""
    said = method.describe()
    method.describe = lambda: said
    object.__setattr__(method.plan, "activation", "none")


def dense(layer) -> None:
    """Replace a packed layer by an unquantized one of seeded weights."""
    rows, columns = layer.output_size, layer.input_size_per_partition
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).mul(0.02).bfloat16()
    for name in ("weight_scale", "weight_scale_2"):
        delattr(layer, name)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.quant_method = UnquantizedLinearMethod()
    layer.quant_method.process_weights_after_loading(layer)


def run(job: dict) -> None:
    os.environ[numerics.JOB] = json.dumps({"path": job["facts"], "checkpoint": job["checkpoint"]})
    ours = {}
    if job["backend"] == "stock":
        os.environ["VLLM_PLUGINS"] = ""
    else:
        settings = PluginSettings(checkpoint=job["checkpoint"], backend=job["backend"], audit=job["audit"])
        ours = {
            "load_format": "workbench",
            "model_loader_extra_config": settings.to_dict(),
            "hf_overrides": command.hf_overrides(settings),
        }
    LLM(
        model=job["checkpoint"],
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=256,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
        worker_cls=job["worker"],
        distributed_executor_backend="uni",
        **ours,
    )
