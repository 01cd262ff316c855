"""The mini models' architectures and checkpoints, small enough to ship.

    model = build_model("mini_kimi")         # random weights, float32, ready to train
    export(model, folder)                    # config, generation config, bfloat16 shards
    load(model, folder)                      # the inverse: train on from an exported checkpoint

mini_kimi is DeepSeek-V3 in the manner of Kimi-K2: MLA with kv_lora_rank 512 and 64 rope dimensions (the only MLA shape
that vLLM's CPU attention serves), yarn, sigmoid routing with a correction bias, 16 experts of which 4 are used, one
shared expert, a dense first layer. mini_qwen is a dense Qwen3: grouped-query attention with normalized heads, tied
embeddings. Every input dimension is a multiple of 64, so blocks of 32 fit on one device and on two.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .tokenizer import BOS_ID, EOS_ID, IM_END_ID, PAD_ID, VOCAB_SIZE

SHARD_BYTES = 8_000_000
MINI_KIMI: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.0,
    "first_k_dense_replace": 1,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    # transformers does not write these two, and vLLM needs them to make the router's bias.
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
MINI_QWEN: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}
ARCHITECTURES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "mini_kimi": (DeepseekV3Config, DeepseekV3ForCausalLM, MINI_KIMI),
    "mini_qwen": (Qwen3Config, Qwen3ForCausalLM, MINI_QWEN),
}
# What transformers adds to every config and what says nothing about this one.
NOT_OF_THE_MODEL = {
    "_name_or_path", "chunk_size_feed_forward", "id2label", "label2id", "is_encoder_decoder", "output_attentions",
    "output_hidden_states", "output_router_logits", "problem_type", "return_dict",
}  # fmt: skip


Change = Callable[[Tensor], Tensor]


def unchanged(t: Tensor) -> Tensor:
    """The change that is none."""
    return t


class DenseMoE(nn.Module):
    """A mixture layer that computes all experts for every token and weights the unused ones with zero.

    Same parameters and same result as transformers' layer. Four times the arithmetic, but two plain matrix products
    instead of a loop over experts, which is faster at this size. `load` holds each expert's share of the last batch's
    tokens. `on_weight` and `on_input` see every matrix and input of an expert: the place for noise or rounding.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.gate, self.experts, self.shared_experts = layer.gate, layer.experts, layer.shared_experts
        self.load = torch.zeros(())
        self.on_weight: Change = unchanged
        self.on_input: Change = unchanged

    def forward(self, x_btk: Tensor) -> Tensor:
        x_mk = x_btk.reshape(-1, x_btk.shape[-1])
        routing_me = self.route(x_mk)
        self.load = (routing_me > 0).float().mean(0).detach()
        experts, width = routing_me.shape[1], self.experts.down_proj.shape[-1]
        w13, w2 = self.on_weight(self.experts.gate_up_proj), self.on_weight(self.experts.down_proj)
        gate_up = F.linear(self.on_input(x_mk), w13.flatten(0, 1)).view(-1, experts, 2, width)
        hidden = self.on_input(F.silu(gate_up[:, :, 0]) * gate_up[:, :, 1])
        hidden = hidden * routing_me.to(gate_up.dtype)[..., None]
        y_mn = F.linear(hidden.flatten(1), w2.transpose(0, 1).flatten(1))
        return y_mn.view(x_btk.shape) + self.shared_experts(x_btk)

    def route(self, x_mk: Tensor) -> Tensor:
        """Tokens x experts: the routing weight, zero where the expert is not among the token's best. The bias chooses
        only."""
        with torch.autocast(x_mk.device.type, enabled=False):
            scores = F.linear(x_mk.float(), self.gate.weight.float()).sigmoid()
        best = torch.topk(scores.detach() + self.gate.e_score_correction_bias, self.gate.top_k, dim=-1).indices
        weights = scores.gather(1, best)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.gate.routed_scaling_factor
        return torch.zeros_like(scores).scatter(1, best, weights)


class ChangedLinear(nn.Linear):
    """A linear layer whose weight passes `on_weight` and whose input passes `on_input`."""

    on_weight: Change
    on_input: Change

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.on_input(x), self.on_weight(self.weight), self.bias)


def with_noise(t: Tensor, snr_db: float) -> Tensor:
    """`t` plus Gaussian noise `snr_db` below each row's own power; the gradient is t's."""
    rms = t.detach().float().square().mean(-1, keepdim=True).sqrt()
    return t + (torch.randn_like(t) * (rms * 10 ** (-snr_db / 20))).to(t.dtype)


def change_linears(model: PreTrainedModel, on_weight: Change, on_input: Change) -> None:
    """Let weights and inputs pass the given changes; `unchanged` ends it. In a mixture of experts those of every MLP
    and expert, in a dense model those of every projection: what their published recipes quantize at most."""
    mixture = bool(mixture_layers(model))
    for layer in model.model.layers:
        for name, module in layer.named_modules():
            if isinstance(module, DenseMoE):
                module.on_weight, module.on_input = on_weight, on_input
            elif isinstance(module, nn.Linear) and name.endswith("_proj") and ("mlp" in name or not mixture):
                module.__class__ = ChangedLinear
                module.on_weight, module.on_input = on_weight, on_input


def use_flash_attention() -> None:
    """Let this process' models attend with padded values. Called by the trainer alone: it changes transformers' own
    table."""
    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend_with_padded_values


def attend_with_padded_values(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
    """MLA's values are narrower than its keys; padded to the same width they take the flash kernel. The result is the
    same."""
    out, weights = sdpa_attention_forward(module, q, k, F.pad(v, (0, k.shape[-1] - v.shape[-1])), *args, **kwargs)
    return out[..., : v.shape[-1]], weights


def build_model(name: str = "mini_kimi", **overrides: Any) -> PreTrainedModel:
    """A model of `ARCHITECTURES` with random weights; its mixture layers are `DenseMoE`. `overrides` change the
    architecture, for tests."""
    config_type, model_type, architecture = ARCHITECTURES[name]
    tokens = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    model = model_type(config_type(**{**architecture, **overrides}, **tokens))
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp = DenseMoE(layer.mlp)
    for key, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            narrow = 0.5 if "down_proj" in key or "o_proj" in key else 1.0
            nn.init.normal_(parameter, std=0.02 if "embed" in key else narrow * parameter.shape[-1] ** -0.5)
    return model


def mixture_layers(model: PreTrainedModel) -> list[DenseMoE]:
    """The mixture layers, in order."""
    return [layer.mlp for layer in model.model.layers if isinstance(layer.mlp, DenseMoE)]


def export(model: PreTrainedModel, folder: Path) -> None:
    """Write config.json, generation_config.json and bfloat16 shards with one tensor per expert matrix, named as
    Kimi-K2 names them."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in model.config.to_dict().items() if key not in NOT_OF_THE_MODEL}
    config |= {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    generation = {
        "bos_token_id": BOS_ID,
        "eos_token_id": [EOS_ID, IM_END_ID],
        "pad_token_id": PAD_ID,
        "do_sample": False,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    shards = _shard(_split_experts(state))
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, name)
    total = sum(t.nbytes for shard in shards for t in shard.values())
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document, indent=2) + "\n")


def load(model: PreTrainedModel, folder: Path) -> None:
    """Read an exported checkpoint into `model`."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model-*.safetensors")):
        tensors |= load_file(path)
    for layer, mlp in enumerate(model.model.layers):
        if not isinstance(mlp.mlp, DenseMoE):
            continue
        prefix = f"model.layers.{layer}.mlp.experts"
        count = mlp.mlp.experts.down_proj.shape[0]
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}.{e}.{part}_proj.weight") for e in range(count)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{prefix}.gate_up_proj": torch.cat([gate, up], dim=1), f"{prefix}.down_proj": down}
    if model.config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors)


def _split_experts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' stacked expert tensors to one tensor a matrix; bfloat16, the router's bias float32 as in
    DeepSeek-V3."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            for e, stacked in enumerate(tensor):
                gate, up = stacked.chunk(2)
                tensors[name.replace("gate_up_proj", f"{e}.gate_proj.weight")] = gate
                tensors[name.replace("gate_up_proj", f"{e}.up_proj.weight")] = up
        elif name.endswith("experts.down_proj"):
            for e, down in enumerate(tensor):
                tensors[name.replace("down_proj", f"{e}.down_proj.weight")] = down
        else:
            tensors[name] = tensor
    return {
        name: tensor.detach().to("cpu", torch.float32 if name.endswith("bias") else torch.bfloat16).contiguous().clone()
        for name, tensor in tensors.items()
    }


def _shard(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Fill shards of at most `SHARD_BYTES`, in the order given."""
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    return shards
