"""Make golden_modelopt.safetensors and golden_modelopt.json: tiny exports of nvidia-modelopt 0.47.0, by preset.

    pip install torch==2.13.0 nvidia-modelopt==0.47.0 transformers==5.14.1 requests && python make_golden_modelopt.py

Of each export only small matrices are kept, as `<preset>/<tensor>`. The JSON holds both config files and, for each
matrix, the SHA-256 of the values that the tool's own class decodes: float32, little-endian, -0 as 0 (the tool knows no
-0). ModelOpt has no inverse of its INT4 packer: that one is written out here.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.export.quant_utils import from_quantized_weight
from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor, MXFP8QTensor, NVFP4QTensor
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
PRESETS = (
    "NVFP4_DEFAULT_CFG",
    "W4A16_NVFP4_CFG",
    "W4A8_NVFP4_FP8_CFG",
    "MXFP4_DEFAULT_CFG",
    "W4A8_MXFP4_FP8_CFG",
    "MXFP8_DEFAULT_CFG",
    "FP8_DEFAULT_CFG",
    "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "INT4_AWQ_CFG",
    "W4A8_AWQ_BETA_CFG",
    "INT8_SMOOTHQUANT_CFG",
    "INT8_WEIGHT_ONLY_CFG",
)
K_PROJ, DOWN_PROJ = "model.layers.0.self_attn.k_proj", "model.layers.0.mlp.down_proj"


def export(preset: str, folder: Path) -> None:
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).bfloat16()
    with torch.no_grad():
        w = model.get_submodule(K_PROJ).weight
        w[3, 32:64] = 0.0  # a zero block
        w[5] = 0.0  # a zero row
        w[7, :16] *= 2.0**-20
    batch = torch.randint(0, 64, (2, 32))
    mtq.quantize(model, getattr(mtq, preset), lambda m: m(batch))
    export_hf_checkpoint(model, export_dir=str(folder))


def decode(parts: dict[str, torch.Tensor], algorithm: str) -> torch.Tensor:
    """The values of a stored weight, by the tool's own class."""
    weight, scale = parts["weight"], parts["weight_scale"]
    n, k = weight.shape[0], weight.shape[1] * (2 if weight.dtype == torch.uint8 else 1)
    kind = {"dtype": torch.float32, "scale": scale}
    if "NVFP4" in algorithm:
        q = NVFP4QTensor(torch.Size((n, k)), torch.float32, weight)
        return q.dequantize(**kind, double_scale=parts["weight_scale_2"], block_sizes={-1: k // scale.shape[1]})
    if "MXFP4" in algorithm:
        return MXFP4QTensor(torch.Size((n, k)), torch.float32, weight).dequantize(**kind, block_sizes={-1: 32})
    if algorithm == "MXFP8":
        return MXFP8QTensor(torch.Size((n, k)), torch.float32, weight).dequantize(**kind, block_sizes={-1: 32})
    if "AWQ" in algorithm:
        low, high = (weight << 4).view(torch.int8) >> 4, weight.view(torch.int8) >> 4
        return torch.stack([low, high], 1).flatten(0, 1) * scale.repeat_interleave(weight.shape[1] // scale.shape[1], 1)
    if weight.dtype == torch.int8:
        return from_quantized_weight(weight, scale, "int8_sq", torch.float32)
    q = FP8QTensor(weight.shape, torch.float32, weight)
    if scale.dim() == 4:
        return q.dequantize(dtype=torch.float32, scale=scale[:, 0, :, 0], block_sizes={-1: 128, -2: 128})
    return q.dequantize(dtype=torch.float32, scale=scale if scale.dim() == 0 else scale[:, None])


def main() -> None:
    tensors: dict[str, torch.Tensor] = {}
    facts: dict[str, Any] = {"tool": "nvidia-modelopt 0.47.0", "torch": torch.__version__, "presets": {}}
    for preset in PRESETS:
        with tempfile.TemporaryDirectory() as scratch:
            export(preset, Path(scratch))
            stored = load_file(Path(scratch) / "model.safetensors")
            config, side = (
                json.loads((Path(scratch) / f).read_text()) for f in ("config.json", "hf_quant_config.json")
            )
        algorithm = side["quantization"]["quant_algo"].upper()
        hashes = {}
        for module in (K_PROJ, DOWN_PROJ) if "AWQ" in algorithm or "SQ" in algorithm else (K_PROJ,):
            parts = {name.removeprefix(module + "."): t for name, t in stored.items() if name.startswith(module + ".")}
            tensors |= {f"{preset}/{module}.{role}": part for role, part in parts.items()}
            values = decode(parts, algorithm).float() + 0.0
            hashes[module + ".weight"] = hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()
        facts["presets"][preset] = {
            "quantization_config": config["quantization_config"],
            "hf_quant_config": side,
            "sha256": hashes,
        }
    save_file(tensors, HERE / "golden_modelopt.safetensors")
    (HERE / "golden_modelopt.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
