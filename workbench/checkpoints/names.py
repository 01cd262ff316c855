"""What a tensor's name says: layer, expert, projection, and which projections a server fuses.

    parse_name("model.layers.1.mlp.experts.3.gate_proj.weight")
    # ParsedName(module="model.layers.1.mlp.experts.3.gate_proj", layer=1, expert=3, projection="gate_proj", ...)

Names are read as the Hub's model families write them (`layers.<i>`, `experts.<j>`, `shared_expert(s)`), under any
prefix (`model.`, `language_model.model.`, `model.language_model.`, `backbone.`) and whatever the MoE block is called
(`mlp`, `block_sparse_moe`, `ffn`, `feed_forward`, `mixer`). Layers of a vision or audio tower or of a
multi-token-prediction head are not the language model's layers and count as layer -1; a prediction layer that DeepSeek
numbers on (`model.layers.61`) cannot be told by its name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

# Projections that read one input and that servers run as one matrix, so producers give them one global scale:
# ModelOpt and llm-compressor share over q/k/v, gate/up (w1/w3), and over MLA's q_a/kv_a; vLLM also runs DeepSeek-V4's
# wq_a/wkv and Qwen3.5's in_proj_qkv/in_proj_z and in_proj_b/in_proj_a as one.
FUSED_PROJECTIONS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("wq_a", "wkv"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)

LANGUAGE_MODEL = {"model", "language_model", "text_model"}  # the parts of its prefix

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
_EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)(?:\.|$)")
_SHARED_EXPERT = re.compile(r"(?:^|\.)(?:shared?_experts?|shared_mlp)(?:\.|$)")
_OTHER_TOWERS = {
    "mtp",
    "nextn",
    "visual",
    "vision_tower",
    "vision_model",
    "vision_encoder",
    "vit",
    "audio_tower",
    "audio_encoder",
    "sound_encoder",
}
_FUSED_KEY = {projection: "+".join(group) for group in FUSED_PROJECTIONS for projection in group}
_EMBEDDINGS = {"embed_tokens", "embed", "embeddings", "wte", "word_embeddings", "tok_embeddings"}
_ROUTERS = {"gate", "router", "shared_expert_gate"}


@dataclass(frozen=True, slots=True)
class ParsedName:
    """Parts of a tensor name. module: without the parameter's name; projection: last module name of a `.weight`,
    "" for other parameters; layer, expert: -1 where none."""

    module: str
    parameter: str
    layer: int
    expert: int
    projection: str
    shared_expert: bool


def parse_name(name: str) -> ParsedName:
    """Read layer, expert and projection out of a tensor name (or a module name followed by `.weight`)."""
    module, _, parameter = name.rpartition(".")
    layer, expert = _LAYER.search(name), _EXPERT.search(name)
    in_other_tower = not _OTHER_TOWERS.isdisjoint(name.split("."))
    return ParsedName(
        module=module,
        parameter=parameter,
        layer=int(layer[1]) if layer and not in_other_tower else -1,
        expert=int(expert[1]) if expert else -1,
        projection=module.rpartition(".")[2] if parameter == "weight" else "",
        shared_expert=bool(_SHARED_EXPERT.search(name)),
    )


def in_language_model(name: str) -> bool:
    """Whether a tensor of a layer, an embedding or a head is the language model's own by its prefix (`model.`,
    `language_model.model.`, none), not a tower's, an encoder's or a prediction head's."""
    layer = _LAYER.search(name)
    prefix = name[: layer.start()] if layer else name.rpartition(".")[0].rpartition(".")[0]
    return LANGUAGE_MODEL.issuperset(part for part in prefix.split(".") if part)


def fusion_group(module: str) -> str | None:
    """A key shared by the modules that servers fuse with `module` (gate/up, q/k/v, q_a/kv_a), None when it is alone."""
    parent, _, projection = module.rpartition(".")
    key = _FUSED_KEY.get(projection)
    return f"{parent}.[{key}]" if key else None


def expert_peers(module: str) -> str:
    """The module name with `*` for its expert index: equal for one projection of all experts of a layer."""
    return _EXPERT.sub(lambda m: m[0].replace(m[1], "*"), module)


def is_embedding(module: str) -> bool:
    return module.rpartition(".")[2] in _EMBEDDINGS


def is_lm_head(module: str) -> bool:
    """The output head: `lm_head`, a top-level `head` / `output` (DeepSeek-V4, Mistral), a prediction layer's copy."""
    last = module.rpartition(".")[2]
    return last == "lm_head" or module in {"head", "output"} or module.endswith(".shared_head.head")


def is_router(module: str) -> bool:
    """The expert router or a shared expert's gate; never `gate_proj`. Some families wrap the router's matrix
    (`router.layer`, `router.proj`, `gate.wg`)."""
    parent, _, last = module.rpartition(".")
    return last in _ROUTERS or parent.rpartition(".")[2] == "router" or module.endswith(".gate.wg")


def ties_embeddings(config: dict[str, Any]) -> bool:
    """Whether config.json says that the output head is the embedding matrix, so that no `lm_head` need be stored."""
    inner = config.get("text_config")
    holders = (config, inner) if isinstance(inner, dict) else (config,)
    return any(holder.get("tie_word_embeddings") is True for holder in holders)


def layer_order(name: str) -> tuple[int, int, tuple[tuple[bool, int, str], ...]]:
    """Sort key: embeddings, then layers 0, 1, ... (numbers compared as numbers), then the rest."""
    parsed = parse_name(name)
    if parsed.layer >= 0:
        block = 1
    else:
        block = 0 if is_embedding(parsed.module) else 2
    return block, parsed.layer, tuple((p.isdecimal(), int(p) if p.isdecimal() else 0, p) for p in name.split("."))
