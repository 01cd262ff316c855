"""What published configs say, as a person reads them: model -> plan.

The table was written from the files, key by key, not from what the code says. A model's config.json and its
hf_quant_config.json go together where both are there.
"""

from __future__ import annotations

from typing import NamedTuple


class Plan(NamedTuple):
    """dialect, algorithm: as the declaration has them. formats: module -> format_of; "" stays unquantized. excludes,
    modules, weight_only: how many. conflicts: a word of each, in order."""

    dialect: str
    algorithm: str
    formats: dict[str, str]
    excludes: int
    kv_cache: str = ""
    activations: str = ""
    modules: int = 0
    weight_only: int = 0
    conflicts: tuple[str, ...] = ()


KIMI = "language_model.model.layers.5."
QWEN = "model.language_model.layers."
_FP8_ALL = {  # no list: everything is declared FP8, the routers, which no reader builds quantized, included
    "model.layers.5.self_attn.q_a_proj": "fp8_block",
    "model.layers.5.mlp.experts.7.gate_proj": "fp8_block",
    "model.layers.5.mlp.shared_experts.up_proj": "fp8_block",
    "model.layers.61.eh_proj": "",
}
_GLM_FP8 = Plan(
    "deepseek_fp8",
    "FP8",
    {
        "model.layers.5.self_attn.q_a_proj": "fp8_block",
        "model.layers.5.mlp.experts.7.down_proj": "fp8_block",
        "model.layers.5.mlp.gate": "",
        "model.layers.78.eh_proj": "",
        "lm_head": "",
    },
    excludes=712,
)
_MINIMAX_FP8 = Plan(
    "deepseek_fp8",
    "FP8",
    {
        "model.layers.5.self_attn.q_proj": "fp8_block",
        "model.layers.5.block_sparse_moe.experts.7.w1": "fp8_block",
        "model.layers.5.block_sparse_moe.gate": "",
        "lm_head": "",
    },
    excludes=3,
)
_MINIMAX_NVFP4 = Plan(
    "modelopt",
    "NVFP4",
    {
        "model.layers.5.self_attn.q_proj": "",
        "model.layers.5.block_sparse_moe.experts.7.w1": "nvfp4",
        "model.layers.5.block_sparse_moe.gate": "",
        "lm_head": "",
    },
    excludes=125,
    kv_cache="FP8",
    activations="nvfp4",
)
_GPT_OSS = Plan(
    "gpt_oss",
    "MXFP4",
    {
        "model.layers.5.self_attn.q_proj": "",
        "model.layers.5.mlp.experts.7.gate_proj": "mxfp4",
        "model.layers.5.mlp.router": "",
        "lm_head": "",
    },
    excludes=4,
)
_V4_FP8 = Plan(
    "deepseek_fp8",
    "FP8",
    {
        "layers.5.attn.wq_a": "fp8_block",
        "layers.5.ffn.experts.7.w1": "fp8_block",
        "layers.5.ffn.shared_experts.w2": "fp8_block",
        "layers.5.attn.compressor.wkv": "",
    },
    excludes=0,
)


def _qwen3_fp8(excludes: int) -> Plan:
    formats = {
        "model.layers.5.self_attn.q_proj": "fp8_block",
        "model.layers.5.mlp.experts.7.gate_proj": "fp8_block",
        "model.layers.5.mlp.gate": "",
        "lm_head": "",
    }
    return Plan("deepseek_fp8", "FP8", formats, excludes)


PLANS = {
    "DERIVED--quark_layer_quant_config_override": Plan(
        "quark",
        "MXFP4",
        {
            "model.layers.5.self_attn.o_proj": "mxfp4",
            "model.layers.5.self_attn.q_a_proj": "",
            "model.layers.5.self_attn.q_b_proj": "mxfp4",
            "model.layers.5.mlp.experts.7.gate_proj": "mxfp4",
            "lm_head": "",
        },
        excludes=3,
        activations="mxfp4",
    ),
    "Firworks--Kimi-Linear-48B-A3B-Instruct-nvfp4_config_excerpt": Plan(
        "compressed_tensors",
        "nvfp4-pack-quantized",
        {
            "model.layers.5.self_attn.q_proj": "nvfp4",
            "model.layers.5.block_sparse_moe.experts.7.w1": "nvfp4",
            "model.layers.5.block_sparse_moe.shared_experts.up_proj": "nvfp4",
            "lm_head": "",
        },
        excludes=1,
        activations="nvfp4",
    ),
    "MiniMaxAI--MiniMax-M2.5": _MINIMAX_FP8,
    "MiniMaxAI--MiniMax-M2.7": _MINIMAX_FP8,
    "Qwen--Qwen3-235B-A22B-FP8": _qwen3_fp8(283),
    "Qwen--Qwen3-30B-A3B-FP8": _qwen3_fp8(145),
    # Its config.json has no quant_method, and its KV cache's scheme is a word.
    "Qwen--Qwen3-32B-FP8-Static-PerTensor": Plan(
        "modelopt",
        "FP8",
        {"model.layers.5.self_attn.q_proj": "fp8_tensor", "model.layers.5.mlp.gate_proj": "fp8_tensor", "lm_head": ""},
        excludes=1,
        kv_cache="FP8",
        activations="fp8_tensor",
    ),
    "XiaomiMiMo--MiMo-V2-Flash": Plan(
        "deepseek_fp8",
        "FP8",
        {"model.layers.5.self_attn.q_proj": "fp8_block", "model.layers.5.mlp.experts.7.gate_proj": "fp8_block"},
        excludes=0,
    ),
    "amd--DeepSeek-V3.2-mxfp4_quark_quantization": Plan(
        "quark",
        "MXFP4",
        {
            "model.layers.5.self_attn.q_a_proj": "",
            "model.layers.5.mlp.experts.7.gate_proj": "mxfp4",
            "model.layers.5.mlp.shared_experts.up_proj": "mxfp4",
            "model.layers.0.mlp.gate_proj": "mxfp4",  # `mlp.gate$` is the router
            "model.layers.5.mlp.gate": "",
            "model.layers.61.mlp.experts.7.gate_proj": "",
            "lm_head": "",
        },
        excludes=4,
        activations="mxfp4",
    ),
    "amd--Kimi-K2.5-fp8-int4_quark_progressive_excerpt": Plan(
        "quark",
        "INT4_CHANNEL",
        {"language_model.model.layers.5.mlp.experts.7.gate_proj": "int4_channel"},
        excludes=0,
        activations="fp8_tensor",
    ),
    "compressed-tensors-docs--Meta-Llama-3-8B-MXFP4": Plan(
        "compressed_tensors",
        "mxfp4-pack-quantized",
        {"model.layers.5.self_attn.q_proj": "mxfp4", "model.layers.5.mlp.gate_proj": "mxfp4", "lm_head": ""},
        excludes=1,
        activations="mxfp4",
    ),
    "compressed-tensors-example--llama1.1b_quant": Plan(
        "compressed_tensors",
        "naive-quantized",
        {"model.layers.5.self_attn.q_proj": "int8_tensor", "model.layers.5.mlp.gate_proj": "int8_tensor"},
        excludes=0,
        activations="int8_tensor",
    ),
    "deepseek-ai--DeepSeek-R1": Plan("deepseek_fp8", "FP8", _FP8_ALL, excludes=0),
    "deepseek-ai--DeepSeek-V3": Plan("deepseek_fp8", "FP8", _FP8_ALL, excludes=0),
    "deepseek-ai--DeepSeek-V3.2": Plan(
        "deepseek_fp8", "FP8", {**_FP8_ALL, "model.layers.5.self_attn.indexer.weights_proj": ""}, excludes=0
    ),
    "deepseek-ai--DeepSeek-V4-Flash": Plan(  # expert_dtype fp4
        "deepseek_fp8",
        "FP8",
        {
            "layers.5.attn.wq_a": "fp8_block",
            "layers.5.ffn.experts.7.w1": "mxfp4",
            "layers.5.ffn.shared_experts.w2": "fp8_block",
            "layers.5.attn.compressor.wkv": "",
        },
        excludes=0,
    ),
    "moonshotai--Kimi-K2-Instruct": Plan("deepseek_fp8", "FP8", _FP8_ALL, excludes=0),
    # The block stands in text_config: what lies beside the language model is not its matter.
    "moonshotai--Kimi-K2.5": Plan(
        "compressed_tensors",
        "pack-quantized",
        {
            KIMI + "self_attn.q_a_proj": "",
            KIMI + "mlp.experts.7.gate_proj": "int4_group",
            KIMI + "mlp.shared_experts.up_proj": "",
            "language_model.model.layers.0.mlp.gate_proj": "",
            "language_model.lm_head": "",
            "vision_tower.encoder.blocks.0.wqkv": "",
            "mm_projector.proj.0": "",
        },
        excludes=6,  # four in the file, and what lies beside
        weight_only=1,  # the target Linear
    ),
    "moonshotai--Kimi-K3": Plan(
        "compressed_tensors",
        "mxfp4-pack-quantized",
        {
            KIMI + "self_attn.q_a_proj": "",
            KIMI + "mlp.experts.7.gate_proj": "mxfp4",
            KIMI + "mlp.shared_experts.up_proj": "",
            "language_model.lm_head": "",
            "vision_tower.encoder.blocks.0.wqkv": "",
        },
        excludes=7,  # six in the file, and the tower, whose model the block is not about
        weight_only=1,
    ),
    "nvidia--DeepSeek-V3.1-NVFP4": Plan(
        "modelopt",
        "NVFP4",
        {
            "model.layers.5.self_attn.q_a_proj": "",
            "model.layers.5.self_attn.o_proj": "nvfp4",
            "model.layers.5.mlp.experts.7.gate_proj": "nvfp4",
            "model.layers.5.mlp.shared_experts.up_proj": "nvfp4",
            "model.layers.61.mlp.experts.7.gate_proj": "",
            "lm_head": "",
        },
        excludes=246,
        kv_cache="FP8",
        activations="nvfp4",
    ),
    "nvidia--DeepSeek-V3.2-NVFP4": Plan(
        "modelopt",
        "NVFP4",
        {
            "model.layers.5.self_attn.indexer.wq_b": "",
            "model.layers.5.self_attn.q_b_proj": "",
            "model.layers.5.self_attn.o_proj": "nvfp4",
            "model.layers.5.mlp.experts.7.gate_proj": "nvfp4",
            "model.layers.61.eh_proj": "",
        },
        excludes=307,
        kv_cache="FP8",
        activations="nvfp4",
    ),
    # `ignore` means "stays FP8" here; quant_method is fp8, the algorithm MIXED_PRECISION.
    "nvidia--DeepSeek-V4-Pro-NVFP4": Plan(
        "deepseek_fp8",
        "MIXED_PRECISION",
        {
            "layers.5.attn.wq_a": "fp8_block",
            "layers.5.ffn.experts.7.w1": "nvfp4",
            "layers.5.ffn.shared_experts.w2": "fp8_block",
        },
        excludes=0,
    ),
    "nvidia--GLM-5-NVFP4": Plan(
        "modelopt",
        "NVFP4",
        {
            "model.layers.5.self_attn.o_proj": "",
            "model.layers.5.self_attn.indexer.wk": "",
            "model.layers.5.mlp.experts.7.down_proj": "nvfp4",
            "model.layers.5.mlp.shared_experts.up_proj": "nvfp4",
            "lm_head": "",
        },
        excludes=471,
        kv_cache="FP8",
        activations="nvfp4",
    ),
    "nvidia--GLM-5.2-NVFP4": Plan(
        "modelopt",
        "NVFP4",
        {
            "model.layers.5.self_attn.o_proj": "",
            "model.layers.0.mlp.gate_proj": "",
            "model.layers.1.mlp.gate_proj": "",
            "model.layers.10.mlp.experts.7.down_proj": "nvfp4",  # not covered by `model.layers.1.*`
            "model.layers.5.mlp.shared_experts.up_proj": "",
            "model.layers.78.mlp.experts.7.down_proj": "",
        },
        excludes=156,
        kv_cache="FP8",
        activations="nvfp4",
    ),
    "nvidia--Gemma-4-26B-A4B-NVFP4": Plan(
        "modelopt",
        "NVFP4",
        {
            QWEN + "5.self_attn.q_proj": "",
            QWEN + "5.experts.7.gate_proj": "nvfp4",
            QWEN + "5.mlp.gate_proj": "",
            QWEN + "5.router.proj": "",
            "model.vision_tower.encoder.layers.0.mlp.gate_proj": "",
            "lm_head": "",
        },
        excludes=93,
        kv_cache="FP8",
        activations="nvfp4",
    ),
    "nvidia--Kimi-K2.5-NVFP4": Plan(
        "modelopt",
        "NVFP4",
        {
            KIMI + "self_attn.q_a_proj": "",
            KIMI + "mlp.experts.7.gate_proj": "nvfp4",
            KIMI + "mlp.shared_experts.up_proj": "nvfp4",
            "language_model.lm_head": "",
            "vision_tower.encoder.blocks.0.wqkv": "",
        },
        excludes=64,
        kv_cache="FP8",
        activations="nvfp4",
    ),
    "nvidia--Kimi-K2.6-NVFP4": Plan(
        "modelopt",
        "NVFP4",
        {
            KIMI + "self_attn.q_a_proj": "",
            KIMI + "mlp.experts.7.gate_proj": "nvfp4",
            KIMI + "mlp.shared_experts.up_proj": "",
            "language_model.model.layers.0.mlp.gate_proj": "",
            "language_model.lm_head": "",
            "mm_projector.proj.0": "",
        },
        excludes=124,
        kv_cache="FP8",
        activations="nvfp4",
    ),
    "nvidia--Llama-3.1-70B-Instruct-FP8": Plan(
        "modelopt",
        "FP8",
        {"model.layers.5.self_attn.q_proj": "fp8_tensor", "lm_head": ""},
        excludes=1,
        kv_cache="FP8",
        activations="fp8_tensor",
    ),
    "nvidia--MiniMax-M2.5-NVFP4": _MINIMAX_NVFP4,
    "nvidia--MiniMax-M2.7-NVFP4": _MINIMAX_NVFP4,
    "nvidia--MiniMax-M3-NVFP4": Plan(
        "modelopt",
        "MIXED_PRECISION",
        {
            KIMI + "self_attn.q_proj": "mxfp8_e4m3",
            KIMI + "self_attn.index_q_proj": "mxfp8_e4m3",
            KIMI + "block_sparse_moe.experts.0.w1": "nvfp4",
            KIMI + "block_sparse_moe.shared_experts.up_proj": "mxfp8_e4m3",
            KIMI + "block_sparse_moe.gate": "",
            "language_model.model.layers.0.mlp.down_proj": "mxfp8_e4m3",
            "vision_tower.encoder.layers.0.fc1": "",
            "lm_head": "",
        },
        excludes=62,
        modules=22422,
    ),
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": Plan(
        "modelopt",
        "NVFP4",
        {
            "backbone.layers.5.mixer.q_proj": "",
            "backbone.layers.1.mixer.experts.7.up_proj": "nvfp4",
            "backbone.layers.1.mixer.shared_experts.up_proj": "nvfp4",
            "backbone.layers.0.mixer.in_proj": "nvfp4",
            "backbone.layers.4.mixer.in_proj": "",
            "lm_head": "",
        },
        excludes=60,
        kv_cache="FP8",
        activations="nvfp4",
    ),
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4": Plan(  # a flat side file of two keys
        "modelopt",
        "NVFP4",
        {"backbone.layers.1.mixer.experts.7.up_proj": "nvfp4"},
        excludes=0,
        kv_cache="FP8",
        activations="nvfp4",
    ),
    "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8": Plan(
        "modelopt",
        "FP8",
        {"backbone.layers.1.mixer.experts.7.up_proj": "fp8_tensor"},
        excludes=0,
        kv_cache="FP8",
        activations="fp8_tensor",
    ),
    "nvidia--NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4": Plan(
        "modelopt",
        "MIXED_PRECISION",
        {
            "backbone.layers.5.mixer.q_proj": "",
            "backbone.layers.1.mixer.experts.0.up_proj": "nvfp4",
            "backbone.layers.1.mixer.shared_experts.up_proj": "nvfp4",
            "backbone.layers.0.mixer.in_proj": "fp8_tensor",
            "backbone.layers.1.mixer.gate": "",
            "lm_head": "nvfp4",
            "mtp.layers.0.mixer.experts.0.up_proj": "",
        },
        excludes=72,
        kv_cache="FP8",
        modules=5981,
        weight_only=5935,
    ),
    "nvidia--Qwen3-235B-A22B-NVFP4": Plan(
        "modelopt",
        "NVFP4",
        {
            "model.layers.5.self_attn.q_proj": "nvfp4",
            "model.layers.5.mlp.experts.7.gate_proj": "nvfp4",
            "model.layers.5.mlp.gate": "",
            "lm_head": "",
        },
        excludes=95,
        kv_cache="FP8",
        activations="nvfp4",
    ),
    # `mtp.layers.0*` leaves mtp.fc declared quantized, which is stored BF16: the config is at fault.
    "nvidia--Qwen3.5-397B-A17B-NVFP4": Plan(
        "modelopt",
        "NVFP4",
        {
            QWEN + "3.self_attn.q_proj": "",
            QWEN + "0.linear_attn.in_proj_qkv": "",
            QWEN + "5.mlp.experts.7.gate_proj": "nvfp4",
            QWEN + "5.mlp.shared_expert.up_proj": "",
            QWEN + "5.mlp.shared_expert_gate": "",
            "model.visual.blocks.0.attn.qkv": "",
            "mtp.layers.0.mlp.experts.7.gate_proj": "",
            "mtp.fc": "nvfp4",
        },
        excludes=184,
        kv_cache="FP8",
        activations="nvfp4",
    ),
    "nvidia--Qwen3.6-27B-NVFP4": Plan(
        "modelopt",
        "MIXED_PRECISION",
        {
            QWEN + "3.self_attn.q_proj": "fp8_tensor",
            QWEN + "0.linear_attn.in_proj_qkv": "fp8_tensor",
            QWEN + "3.mlp.gate_proj": "nvfp4",
            "lm_head": "nvfp4",
            "mtp.fc": "",
            "model.visual.blocks.0.attn.qkv": "",  # listed nowhere
        },
        excludes=2,
        kv_cache="FP8",
        modules=401,
        weight_only=193,
    ),
    # Its files are of two exports; config.json, which is taken, has no KV cache, and a group with 4-bit activations
    # whose layers quantized_layers calls weight-only.
    "nvidia--Qwen3.6-35B-A3B-NVFP4": Plan(
        "modelopt",
        "MIXED_PRECISION",
        {
            QWEN + "3.self_attn.q_proj": "fp8_tensor",
            QWEN + "0.linear_attn.out_proj": "fp8_tensor",
            QWEN + "3.mlp.experts.7.gate_proj": "nvfp4",  # the container is listed
            QWEN + "3.mlp.shared_expert.up_proj": "nvfp4",
            QWEN + "3.mlp.gate": "",
            "lm_head": "nvfp4",
            "mtp.fc": "",
        },
        excludes=2,
        modules=291,
        weight_only=161,
        conflicts=("group_1", "KV", "0.37.0"),
    ),
    "openai--gpt-oss-120b": _GPT_OSS,
    "openai--gpt-oss-20b": _GPT_OSS,
    "sgl-project--DeepSeek-V4-Flash-FP8": _V4_FP8,
    "sgl-project--DeepSeek-V4-Pro-FP8": _V4_FP8,
    "zai-org--GLM-5-FP8": _GLM_FP8,
    "zai-org--GLM-5.1-FP8": _GLM_FP8,
}
