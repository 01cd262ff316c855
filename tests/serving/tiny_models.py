"""Tiny seeded models that vLLM serves: a DeepSeek-V3 (MLA, noaux_tc, shared expert), a Qwen3-MoE (grouped heads) and a
dense Qwen3."""

from __future__ import annotations

from pathlib import Path

import torch

VOCABULARY = 512
EXCLUDED = "model.layers.1.mlp.shared_experts"  # what the tests keep unquantized of the DeepSeek


def make_deepseek(path: Path) -> Path:
    """3 layers (the first dense), 8 routed experts top 2, MLA with kv_lora_rank 512 + rope 64, yarn; BF16."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=8,
        routed_scaling_factor=2.5,
        kv_lora_rank=512,
        q_lora_rank=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        qk_nope_head_dim=64,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        initializer_range=0.06,
        tie_word_embeddings=False,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=None,
        dtype="bfloat16",
        num_nextn_predict_layers=0,
        topk_method="noaux_tc",  # without these two vLLM builds no e_score_correction_bias
        scoring_func="sigmoid",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 50000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )
    torch.manual_seed(1)
    model = DeepseekV3ForCausalLM(config)
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.normal_(0, 0.01)
    return _save(model, path)


_QWEN = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "initializer_range": 0.06,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "bos_token_id": None,
    "dtype": "bfloat16",
}


def make_qwen(path: Path) -> Path:
    """2 layers, 8 experts top 2, 4 query heads on 2 key-value heads; BF16."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **_QWEN,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
    )
    torch.manual_seed(0)
    return _save(Qwen3MoeForCausalLM(config), path)


def make_dense(path: Path) -> Path:
    """The same without experts."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(2)
    return _save(Qwen3ForCausalLM(Qwen3Config(**_QWEN)), path)


def make_prompts(count: int = 6) -> list[list[int]]:
    """Seeded token ids, 20 to 60 tokens long."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(20, 61, (count,), generator=generator).tolist()
    return [torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def _save(model: torch.nn.Module, path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(i): i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="0", pad_token="0").save_pretrained(path)
    model.eval().to(torch.bfloat16)
    model.save_pretrained(path, safe_serialization=True)
    return path
