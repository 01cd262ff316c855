"""Small checkpoints of every dialect, written by hand from what producers store: what the fuzz tests mutate.

Each has the projections of one attention layer or a few experts, 32 x 64, with random codes and ordinary scales. A
dialect without a seed fails `test_every_dialect_has_a_seed`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

N, K = 32, 64
LAYER = "model.layers.0."
MODULES = tuple(LAYER + m for m in ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj"))


@dataclass(frozen=True)
class Seed:
    """config_decides: decoding takes parameters from config.json, so a changed config may change values."""

    dialect: str
    tensors: dict[str, torch.Tensor]
    quantization: dict[str, Any] | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    config_decides: bool = False

    def write(self, path: Path) -> Path:
        """Two shards and an index: a module's parts lie in different files."""
        path.mkdir(parents=True)
        names = sorted(self.tensors)
        weight_map = {}
        for number in (0, 1):
            file = f"model-{number + 1:05d}-of-00002.safetensors"
            part = {name: self.tensors[name] for name in names[number::2]}
            save_file(part, path / file, metadata={"format": "pt", **self.metadata})
            weight_map.update(dict.fromkeys(part, file))
        index = {"metadata": {"total_size": sum(t.nbytes for t in self.tensors.values())}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        text = {"num_hidden_layers": 1, "num_experts": 2, "hidden_size": K}
        config: dict[str, Any] = {"model_type": "llama", "tie_word_embeddings": True, **text, "text_config": text}
        if self.quantization is not None:
            config["quantization_config"] = self.quantization
        (path / "config.json").write_text(json.dumps(config))
        return path


def make_seeds() -> dict[str, Seed]:
    """Seeds by name."""
    g = torch.Generator().manual_seed(7)

    def codes(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=g).byte().view(dtype)

    def scales(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=g) * 0.01 + 0.01

    def e8m0(*shape: int) -> torch.Tensor:
        return torch.randint(110, 126, shape, generator=g).byte()

    def e4m3(*shape: int) -> torch.Tensor:
        return (torch.rand(shape, generator=g) * 100 + 1).to(torch.float8_e4m3fn)

    def fp8(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=g) * 50).clamp(-400, 400).to(torch.float8_e4m3fn)

    def every(parts: dict[str, Callable[[], torch.Tensor]]) -> dict[str, torch.Tensor]:
        tensors = {f"{module}.{part}": make() for module in MODULES for part, make in parts.items()}
        tensors["model.embed_tokens.weight"] = torch.randn(40, K, generator=g).bfloat16()
        tensors[LAYER + "input_layernorm.weight"] = torch.ones(K, dtype=torch.bfloat16)
        return tensors

    def nvfp4(weight: str, global_scale: str, input_scale: str, shape: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
        return every(
            {
                weight: lambda: codes(N, K // 2),
                "weight_scale": lambda: e4m3(N, K // 16),
                global_scale: lambda: torch.full(shape, 0.001 if not shape else 800.0),
                input_scale: lambda: torch.full(shape, 0.002 if not shape else 400.0),
            }
        )

    mxfp4 = every({"weight": lambda: codes(N, K // 2), "weight_scale": lambda: e8m0(N, K // 32)})
    experts = LAYER + "mlp.experts."
    gpt_oss = {
        experts + "gate_up_proj_blocks": codes(2, 2 * N, K // 32, 16),
        experts + "gate_up_proj_scales": e8m0(2, 2 * N, K // 32),
        experts + "gate_up_proj_bias": torch.randn(2, 2 * N, generator=g).bfloat16(),
        experts + "down_proj_blocks": codes(2, K, N // 32, 16),
        experts + "down_proj_scales": e8m0(2, K, N // 32),
        experts + "down_proj_bias": torch.randn(2, K, generator=g).bfloat16(),
    }
    return {
        "plain": Seed("plain", every({"weight": lambda: torch.randn(N, K, generator=g).bfloat16()})),
        "modelopt-nvfp4": Seed(
            "modelopt",
            nvfp4("weight", "weight_scale_2", "input_scale"),
            {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "ignore": ["lm_head"],
                "producer": {"name": "modelopt"},
            },
        ),
        "quark-mxfp4": Seed("quark", mxfp4, _quark(dtype="fp4", scale_format="e8m0", scale_type="float")),
        "quark-int4": Seed(
            "quark",
            every(
                {
                    "weight": lambda: codes(K, N // 8, dtype=torch.int32),
                    "weight_scale": lambda: scales(K // 32, N).bfloat16(),
                    "weight_zero_point": lambda: torch.zeros(K // 32, N // 8, dtype=torch.int32),
                }
            ),
            _quark(dtype="int4", scale_type="float", symmetric=True),
            config_decides=True,
        ),
        "compressed-tensors-nvfp4": Seed(
            "compressed_tensors",
            nvfp4("weight_packed", "weight_global_scale", "input_global_scale", (1,)),
            _compressed("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16, symmetric=True),
        ),
        "compressed-tensors-int4": Seed(
            "compressed_tensors",
            every(
                {
                    "weight_packed": lambda: codes(N, K // 8, dtype=torch.int32),
                    "weight_scale": lambda: scales(N, K // 32).bfloat16(),
                    "weight_zero_point": lambda: codes(N // 8, K // 32, dtype=torch.int32),
                    "weight_shape": lambda: torch.tensor([N, K]),
                }
            ),
            _compressed("pack-quantized", type="int", strategy="group", group_size=32, symmetric=False),
            config_decides=True,
        ),
        "deepseek-fp8": Seed(
            "deepseek_fp8",
            every({"weight": lambda: fp8(N, K), "weight_scale_inv": lambda: scales(1, 1)}),
            {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
            config_decides=True,
        ),
        "gpt-oss": Seed(
            "gpt_oss",
            gpt_oss,
            {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        ),
        "gptq": Seed(
            "gptq",
            every(
                {
                    "qweight": lambda: codes(K // 8, N, dtype=torch.int32),
                    "qzeros": lambda: codes(K // 32, N // 8, dtype=torch.int32),
                    "scales": lambda: scales(K // 32, N).half(),
                    "g_idx": lambda: (torch.arange(K) // 32).int(),
                }
            ),
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
            config_decides=True,
        ),
        "awq": Seed(
            "awq",
            every(
                {
                    "qweight": lambda: codes(K, N // 8, dtype=torch.int32),
                    "qzeros": lambda: codes(K // 32, N // 8, dtype=torch.int32),
                    "scales": lambda: scales(K // 32, N).half(),
                }
            ),
            {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
            config_decides=True,
        ),
        "torchao": Seed(
            "torchao",
            every(
                {
                    "_weight_qdata": lambda: codes(N, K // 2),
                    "_weight_scale": lambda: e8m0(32, 16).view(torch.float8_e8m0fnu),
                }
            ),
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "MXDynamicActivationMXWeightConfig"}}},
            metadata={f"{module}.weight": json.dumps(_torchao_mx()) for module in MODULES},
            config_decides=True,
        ),
    }


def _quark(**weight: Any) -> dict[str, Any]:
    spec = {"qscheme": "per_group", "group_size": 32, "ch_axis": -1, "is_dynamic": False, **weight}
    return {
        "quant_method": "quark",
        "exclude": ["lm_head"],
        "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
        "global_quant_config": {"weight": spec, "input_tensors": None, "output_tensors": None, "bias": None},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
    }


def _compressed(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "dynamic": False, **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": format}},
        "ignore": ["lm_head"],
    }


def _torchao_mx() -> dict[str, Any]:
    """Parameters of a tensor, in the keys that torchao 0.18.0 writes into the safetensors metadata."""
    return {
        "_type": "MXTensor",
        "_data": {
            "elem_dtype": {"_type": "torch.dtype", "_data": "float4_e2m1fn_x2"},
            "block_size": 32,
            "orig_dtype": {"_type": "torch.dtype", "_data": "bfloat16"},
            "is_swizzled_scales": True,
        },
        "_tensor_data_names": ["qdata", "scale"],
    }
