"""Lint check on shapes: weights that contradict each other, or config.json. No tensor is read.

Compared is what every family of decoder layers has in common: gate and up are alike and down is their transpose, the
projections that read one input have one K, a layer's experts are alike, a bias has its weight's N, and what reads or
writes the residual stream has `hidden_size`. What varies between families (numbers of heads, intermediate sizes a
layer) is not. A matrix is named once, for the first reason.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from workbench.records import LintFinding

from .dialects.stacks import language_configs
from .lint_findings import entry_finding
from .names import expert_peers, in_language_model, is_embedding, is_lm_head, parse_name
from .open import Checkpoint, Entry

# gate, up and down as the families name them; down is looked at where the other two are there.
GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("q_a_proj", "kv_a_proj_with_mqa"), ("wq_a", "wkv"))
READS_HIDDEN = {"qkv_proj", "gate_up_proj", *(name for group in SAME_INPUT for name in group)}
READS_HIDDEN |= {name for gate, up, _ in GATED for name in (gate, up)}
WRITES_HIDDEN = {"o_proj", *(down for _, _, down in GATED)}
LAYER_NORMS = {"input_layernorm", "post_attention_layernorm"}
# Keys of other widths than hidden_size: of experts that work in a latent space, and of embeddings that are projected.
EXPERT_WIDTHS = ("moe_latent_size", "routed_expert_hidden_size")
EMBEDDING_WIDTHS = ("word_embed_proj_dim", "embedding_size")
# Modules of a decoder layer that read the residual stream; others (indexers, compressors) may not.
_BLOCK = re.compile(
    r".*\blayers\.\d+\.(self_attn|attn|attention|mlp|feed_forward|ffn|block_sparse_moe|moe|mixer)"
    r"(\.experts\.\d+|\.shared_experts?|\.shared_mlp)?"
)
_LAYER = re.compile(r".*\blayers\.\d+")
_FIX = "export the checkpoint again; a shard or a config of another model may have got in"


def check_shape_conflict(checkpoint: Checkpoint) -> Iterator[LintFinding]:
    """shape-conflict: a dimension of zero, a linear layer that is no matrix, weights whose sizes contradict each other,
    hidden_size or vocab_size."""
    entries = checkpoint.entries()
    named: set[str] = set()
    for check in (_empty, _no_matrix, _other_width, _small_vocabulary, _unlike_experts, _unlike_partners, _unlike_bias):
        faults = [(e, message) for e, message in check(checkpoint, [e for e in entries if e.name not in named])]
        if faults:
            yield entry_finding("shape-conflict", "error", faults[0][1], [e for e, _ in faults], _FIX)
            named |= {e.name for e, _ in faults}


Faults = Iterator[tuple[Entry, str]]


def _empty(_: Checkpoint, entries: Sequence[Entry]) -> Faults:
    for e in entries:
        if 0 in e.shape:
            yield e, f"{e.name} is {list(e.shape)}: it holds nothing"


def _no_matrix(_: Checkpoint, entries: Sequence[Entry]) -> Faults:
    for e in entries:
        last = e.module.rpartition(".")[2]
        linear = e.layer >= 0 and last in READS_HIDDEN | WRITES_HIDDEN
        stack = len(e.shape) == 3 and ("experts" in e.name or "moe" in e.name)
        if e.name.endswith(".weight") and len(e.shape) != 2 and not stack and (linear or is_lm_head(e.module)):
            yield e, f"{e.name} is {list(e.shape)}, expected a matrix [N, K]"


def _other_width(checkpoint: Checkpoint, entries: Sequence[Entry]) -> Faults:
    """What reads or writes the residual stream, and is not of its width. Draft models and Zamba2 read two of them."""
    hidden = _size(checkpoint, "hidden_size")
    if not hidden:
        return
    of_experts = {hidden, *(_size(checkpoint, key) for key in EXPERT_WIDTHS)}
    projected = any(_size(checkpoint, key) for key in EMBEDDING_WIDTHS)
    said = f"hidden_size of config.json is {hidden}"
    for e in entries:
        parsed = parse_name(e.name)
        if parsed.parameter != "weight" or not in_language_model(e.name):
            continue
        parent, _, last = e.module.rpartition(".")
        widths = of_experts if e.expert >= 0 else {hidden}
        if len(e.shape) == 2 and e.layer >= 0 and _BLOCK.fullmatch(parent):
            n, k = e.shape
            if last in READS_HIDDEN and k not in widths | {2 * w for w in widths}:
                yield e, f"{e.name} is {list(e.shape)}, K = {k}, but {said}"
            elif last in WRITES_HIDDEN and n not in widths:
                yield e, f"{e.name} is {list(e.shape)}, N = {n}, but {said}"
        elif len(e.shape) == 2 and (is_embedding(e.module) or is_lm_head(e.module)):
            if e.shape[1] != hidden and not projected:
                yield e, f"{e.name} is {list(e.shape)}, K = {e.shape[1]}, but {said}"
        elif last in LAYER_NORMS and _LAYER.fullmatch(parent) and e.shape not in ((hidden,), (2 * hidden,)):
            yield e, f"{e.name} is {list(e.shape)}, but {said}"


def _small_vocabulary(checkpoint: Checkpoint, entries: Sequence[Entry]) -> Faults:
    """Rows may be padded; fewer than tokens cannot be."""
    sizes = [size for key in ("vocab_size", "draft_vocab_size") if (size := _size(checkpoint, key))]
    for e in entries:
        if len(e.shape) != 2 or not in_language_model(e.name) or not e.name.endswith(".weight"):
            continue
        if (is_embedding(e.module) or is_lm_head(e.module)) and e.shape[0] < min(sizes, default=0):
            yield e, f"{e.name} is {list(e.shape)}, but vocab_size of config.json is {sizes[0]}"


def _unlike_experts(_: Checkpoint, entries: Sequence[Entry]) -> Faults:
    peers: dict[str, list[Entry]] = defaultdict(list)
    for e in entries:
        if e.expert >= 0 and e.projection:
            peers[expert_peers(e.module)].append(e)
    for group in peers.values():
        usual = Counter(e.shape for e in group).most_common(1)[0][0]
        for e in group:
            if e.shape != usual:
                yield e, f"{e.name} is {list(e.shape)}, its sibling experts are {list(usual)}"


def _unlike_partners(_: Checkpoint, entries: Sequence[Entry]) -> Faults:
    modules: dict[str, dict[str, Entry]] = defaultdict(dict)
    for e in entries:
        if e.layer >= 0 and e.projection and len(e.shape) == 2:
            modules[e.module.rpartition(".")[0]][e.projection] = e
    for parent, parts in modules.items():
        for gate, up, down in GATED:
            if up not in parts or (gate not in parts and up != "up_proj"):
                continue
            n, k = parts[up].shape
            if gate in parts and parts[gate].shape != (n, k):
                yield parts[gate], f"{parts[gate].name} is {list(parts[gate].shape)}, {up} beside it {[n, k]}"
            elif down in parts and parts[down].shape != (k, n):
                yield parts[down], f"{parts[down].name} is {list(parts[down].shape)}, {up} beside it {[n, k]}"
        if "gate_up_proj" in parts and "down_proj" in parts:
            both, second = parts["gate_up_proj"], parts["down_proj"]
            if second.shape != (both.shape[1], both.shape[0] // 2) or both.shape[0] % 2:
                yield second, f"{second.name} is {list(second.shape)}, gate_up_proj beside it {list(both.shape)}"
        for group in () if "cross" in parent else SAME_INPUT:  # cross-attention reads two
            readers = [parts[name] for name in group if name in parts]
            for e in readers[1:]:
                if e.shape[1] != readers[0].shape[1]:
                    yield e, f"{e.name} is {list(e.shape)}, {readers[0].projection} beside it {list(readers[0].shape)}"


def _unlike_bias(_: Checkpoint, entries: Sequence[Entry]) -> Faults:
    weights = {e.module: e for e in entries if e.layer >= 0 and e.projection and len(e.shape) == 2}
    for e in entries:
        weight = weights.get(e.module) if e.name.endswith(".bias") else None
        if weight is not None and e.shape != weight.shape[:1]:
            yield e, f"{e.name} is {list(e.shape)}, its weight {list(weight.shape)}"


def _size(checkpoint: Checkpoint, key: str) -> int:
    """The first such number above 0 that a config of the language model has; 0 for none."""
    values = (c.get(key) for c in language_configs(checkpoint.config))
    return next((v for v in values if type(v) is int and v > 0), 0)
