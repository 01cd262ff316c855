"""Reading names and matching exclude patterns."""

from __future__ import annotations

import pytest

from workbench.checkpoints import matches_any, parse_name
from workbench.checkpoints.names import (
    expert_peers,
    fusion_group,
    is_embedding,
    is_lm_head,
    is_router,
    layer_order,
    ties_embeddings,
)
from workbench.errors import CheckpointError


@pytest.mark.parametrize(
    ("name", "layer", "expert", "projection", "shared"),
    [
        ("model.layers.1.mlp.experts.13.gate_proj.weight", 1, 13, "gate_proj", False),
        ("language_model.model.layers.60.mlp.shared_experts.down_proj.weight", 60, -1, "down_proj", True),
        ("model.layers.3.mlp.shared_expert_gate.weight", 3, -1, "shared_expert_gate", False),
        ("model.layers.2.block_sparse_moe.experts.7.w1.weight", 2, 7, "w1", False),
        ("model.layers.0.mlp.gate.e_score_correction_bias", 0, -1, "", False),
        ("model.layers.0.self_attn.q_proj.bias", 0, -1, "", False),
        ("model.embed_tokens.weight", -1, -1, "embed_tokens", False),
        ("vision_tower.encoder.layers.4.mlp.fc1.weight", -1, -1, "fc1", False),
        ("mtp.layers.0.mlp.experts.3.up_proj.weight", -1, 3, "up_proj", False),
        ("model.mtp.layers.0.self_attn.q_proj.weight", -1, -1, "q_proj", False),
        ("model.nextn.layers.0.self_attn.q_proj.weight", -1, -1, "q_proj", False),
        ("mtp.0.ffn.experts.7.w2.weight", -1, 7, "w2", False),
        ("language_model.model.layers.4.mlp.experts.9.gate_proj.weight", 4, 9, "gate_proj", False),
        ("model.language_model.layers.4.linear_attn.in_proj_qkv.weight", 4, -1, "in_proj_qkv", False),
        ("backbone.layers.5.mixer.experts.2.up_proj.weight", 5, 2, "up_proj", False),
        ("layers.6.ffn.experts.255.w3.weight", 6, 255, "w3", False),
        ("layers.6.ffn.shared_experts.w1.weight", 6, -1, "w1", True),
        ("model.layers.7.feed_forward.experts.1.down_proj.weight", 7, 1, "down_proj", False),
        ("language_model.model.layers.7.feed_forward.shared_expert.up_proj.weight", 7, -1, "up_proj", True),
        ("model.layers.8.moe.experts.1.up_proj.weight", 8, 1, "up_proj", False),
        ("model.layers.8.share_expert.up_proj.weight", 8, -1, "up_proj", True),
        ("model.layers.8.mlp.shared_mlp.up_proj.weight", 8, -1, "up_proj", True),
        ("model.layers.8.mlp.experts.3.gate_proj.bias", 8, 3, "", False),
        ("vit.layers.2.mlp.fc1.weight", -1, -1, "fc1", False),
        ("sound_encoder.encoder.layers.2.fc1.weight", -1, -1, "fc1", False),
    ],
)
def test_parts_of_a_name(name, layer, expert, projection, shared):
    parsed = parse_name(name)
    found = (parsed.layer, parsed.expert, parsed.projection, parsed.shared_expert)
    assert found == (layer, expert, projection, shared)
    assert parsed.module == name.rpartition(".")[0]


def test_fusion_groups():
    base = "model.layers.1.self_attn."
    assert fusion_group(base + "q_proj") == fusion_group(base + "k_proj") == fusion_group(base + "v_proj")
    assert fusion_group(base + "q_a_proj") == fusion_group(base + "kv_a_proj_with_mqa")
    assert fusion_group(base + "o_proj") is None
    assert fusion_group("a.experts.1.gate_proj") == fusion_group("a.experts.1.up_proj")
    assert fusion_group("a.experts.1.w1") == fusion_group("a.experts.1.w3") != fusion_group("a.experts.2.w1")
    assert fusion_group("a.experts.1.w2") is None
    assert expert_peers("a.experts.11.w2") == expert_peers("a.experts.1.w2")
    assert fusion_group("layers.0.attn.wq_a") == fusion_group("layers.0.attn.wkv")
    assert fusion_group(base + "in_proj_qkv") == fusion_group(base + "in_proj_z") != fusion_group(base + "in_proj_b")


def test_routers_and_heads_are_told_by_whole_words():
    assert is_router("model.layers.1.mlp.gate")
    assert not is_router("model.layers.1.mlp.gate_proj")
    assert is_lm_head("language_model.lm_head")
    assert not is_lm_head("model.layers.1.attn.output")
    assert is_lm_head("model.layers.61.shared_head.head")
    assert is_router("model.layers.1.block_sparse_moe.router.layer")
    assert is_router("model.layers.1.mlp.gate.wg")
    assert not is_router("model.layers.1.attn.compressor.wgate")
    assert is_embedding("embed")
    assert not is_embedding("vision_tower.patch_embed")


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, True),
        ({"tie_word_embeddings": False}, False),
        ({"text_config": None}, False),
        ({}, False),
    ],
)
def test_tied_embeddings(config, tied):
    assert ties_embeddings(config) is tied


def test_layers_and_experts_are_ordered_as_numbers():
    names = [f"model.layers.{i}.mlp.experts.{e}.up_proj.weight" for i in (0, 2, 10) for e in (1, 2, 10)]
    everything = ["model.embed_tokens.weight", *names, "lm_head.weight", "model.norm.weight"]
    assert sorted(reversed(everything), key=layer_order) == everything


@pytest.mark.parametrize(
    ("module", "patterns", "expected"),
    [
        ("model.layers.1.x", ["model.layers.1*"], True),
        ("model.layers.12.x", ["model.layers.1*"], True),  # a glob has no word boundary
        ("model.layers.2.x", ["model.layers.1*"], False),
        ("model.layers.12.x", ["model.layers.1.*"], False),
        ("vision_tower.a.b", ["vision_tower"], True),
        ("head", ["head"], True),
        ("lm_head", ["head"], False),
        ("model.layers.0.mlp.gate_proj", ["model.layers.0.mlp.gate"], False),
        ("x.shared_expert", ["x.shared_expert_gate"], False),
        ("x.shared_expert_gate", ["x.shared_expert"], False),
        ("a.q_proj", ["a.q_proj.linear"], True),
        ("a.q_proj", ["a.q_proj.weight"], True),
        ("model.layers.3.self_attn.q_proj", ["re:.*self_attn.*"], True),
        ("model.layers.3.mlp.gate", ["re:.*mlp.gate$"], True),
        ("model.layers.3.mlp.gate_proj", ["re:.*mlp.gate$"], False),
        ("model.layers.3.mlp.gate_proj", ["re:mlp"], False),  # anchored at the start
        ("model.layers.3.mlp.up_proj", ["lm_head", "*.mlp.?p_proj"], True),
        ("model.layers.3.mlp.up_proj", [], False),
    ],
)
def test_exclude_patterns(module, patterns, expected):
    assert matches_any(module, patterns) is expected


def test_broken_regex_names_itself():
    with pytest.raises(CheckpointError, match=r"re:\(unclosed"):
        matches_any("a", ["re:(unclosed"])
