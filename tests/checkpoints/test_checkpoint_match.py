"""Exclude patterns: what each means, on the lists that producers published and the faults that users reported."""

from __future__ import annotations

import fnmatch
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.checkpoints.match import matches, matches_any, unmatched_patterns
from workbench.errors import CheckpointError

LAYER = "model.layers.3."


@pytest.mark.parametrize(
    ("pattern", "covered", "not_covered"),
    [
        # vllm#30164: a glob also takes the tens; a bare name covers what lies below it; no substrings
        ("model.layers.1*", ["model.layers.1.x", "model.layers.12.x"], ["model.layers.2.x"]),
        ("vision_tower", ["vision_tower.a.b", "model.vision_tower.a"], ["vision_tower_2.a"]),
        ("head", ["head"], ["lm_head", "x.header"]),
        # vllm#48883: the head is excluded without its prefix
        ("lm_head", ["lm_head", "language_model.lm_head"], ["lm_head_2", "model.lm_headx"]),
        # vllm#54206, sglang#39317
        ("x.shared_expert_gate", ["x.shared_expert_gate"], ["x.shared_expert", "x.shared_expert.up_proj"]),
        ("*.mlp.shared_expert.*", [LAYER + "mlp.shared_expert.up_proj"], [LAYER + "mlp.shared_expert_gate"]),
        (
            "visual.blocks.0.attn.qkv_proj",
            ["visual.blocks.0.attn.qkv_proj", "visual.blocks.0.attn.k_proj", "model.visual.blocks.0.attn.v_proj"],
            ["visual.blocks.0.attn.o_proj"],
        ),
        (
            LAYER + "mlp.experts.0.down_proj",
            [LAYER + "mlp.experts.0.down_proj"],
            [LAYER + "mlp.experts.1.down_proj", LAYER + "mlp.experts"],
        ),
        ("*.experts.*.gate_up_proj", [LAYER + "mlp.experts.4.up_proj"], [LAYER + "mlp.experts.4.down_proj"]),
        # sglang#24929: the wrapper's suffix names no module
        ("a.q_proj.linear", ["a.q_proj"], ["a.k_proj"]),
        ("a.q_proj.weight", ["a.q_proj"], ["a.k_proj"]),
        # vllm#54547, sglang#38781: the checkpoint's naming and the runtime's
        (
            "model.language_model.layers.3.self_attn*",
            ["language_model.model.layers.3.self_attn.q_proj", "model.language_model.layers.3.self_attn"],
            ["model.layers.3.self_attn.q_proj"],
        ),
        ("model.visual.*", ["visual.blocks.0.attn.qkv"], ["model.language_model.layers.0.x"]),
        ("re:.*language_model\\.layers\\.3\\.", ["language_model.model.layers.3.x"], ["model.layers.3.x"]),
        # sglang#18546: from the start, no substring; vllm#38832: the faulty form leaves mtp.fc quantized
        ("mtp*", ["mtp.fc", "mtp.layers.0.q_proj", "model.mtp.fc"], ["model.layers.0.mtp_gate", "x.mtp.fc"]),
        ("mtp.layers.0*", ["mtp.layers.0.q_proj"], ["mtp.fc"]),
        # transformers' lists (gpt-oss, MiniMax)
        ("model.layers.*.self_attn", [LAYER + "self_attn.q_proj"], [LAYER + "self_attn_norm", LAYER + "mlp.up_proj"]),
        ("gate", [LAYER + "block_sparse_moe.gate"], [LAYER + "mlp.gate_proj"]),
        # Quark's and compressed-tensors' regexes match from the start and need not reach the end
        ("re:.*mlp.gate$", [LAYER + "mlp.gate"], [LAYER + "mlp.gate_proj"]),
        ("re:model.layers.61.*", ["model.layers.61.mlp.up_proj"], ["x.model.layers.61.mlp.up_proj"]),
        ("*", ["anything.at.all"], []),
        ("model.*", ["model.x"], ["lm_head"]),
        ("*proj[12]", ["a.proj1"], ["a.proj3"]),
    ],
)
def test_what_a_pattern_covers(pattern, covered, not_covered):
    assert [m for m in covered if not matches(m, pattern)] == []
    assert [m for m in not_covered if matches(m, pattern)] == []


def test_a_regex_that_is_none_is_refused_and_flags_do_not_leak_into_others():
    with pytest.raises(CheckpointError, match="no regular expression"):
        matches_any("a", ["re:("])
    patterns = ("re:(?i)LM_HEAD", "re:(?P<a>x)", "re:(?P<a>y)", "b.c")
    assert matches_any("lm_head", patterns)
    assert not matches_any("B.C", patterns)


PARTS = st.sampled_from(
    ["model", "language_model", "layers", "1", "12", "mlp", "gate", "gate_proj", "experts", "lm_head"]
)
NAMES = st.lists(PARTS, min_size=1, max_size=6).map(".".join)
PATTERNS = st.one_of(
    NAMES, NAMES.map(lambda n: n + "*"), NAMES.map(lambda n: "*" + n[1:]), NAMES.map(lambda n: f"*.{n}.*")
)


@settings(deadline=None)
@given(NAMES, st.lists(PATTERNS, max_size=12))
def test_many_patterns_cover_what_one_of_them_covers(module, patterns):
    assert matches_any(module, tuple(patterns)) == any(matches(module, p) for p in patterns)
    assert unmatched_patterns(patterns, [module]) == [p for p in patterns if not matches(module, p)]


@settings(deadline=None)
@given(NAMES, PATTERNS)
def test_what_fnmatch_covers_is_covered(module, pattern):
    if fnmatch.fnmatchcase(module, pattern):
        assert matches(module, pattern)


def test_patterns_written_for_another_tree_are_all_dead():
    """vllm#54547: none of the entries matched, and nothing said so."""
    names = [f"model.layers.{i}.self_attn.{p}_proj" for i in range(400) for p in "qkv"]
    runtime = ["language_model." + n for n in names]  # the same modules as a server names them
    assert unmatched_patterns(runtime, names) == runtime
    assert unmatched_patterns(["model.language_model." + n.removeprefix("model.") for n in names], runtime) == []
    globs = ["model.language_model.layers.1*", "re:.*k_proj", "*.o_proj"]
    assert unmatched_patterns(globs, runtime) == ["*.o_proj"]


@pytest.mark.parametrize("kind", ["tuple", "list"])
def test_a_hundred_thousand_modules_against_five_thousand_patterns(kind):
    projections = ("gate_proj", "up_proj", "down_proj")
    modules = [f"model.layers.{i}.mlp.experts.{e}.{p}" for i in range(61) for e in range(547) for p in projections]
    modules = modules[:100_000]
    names = [f"model.layers.{i}.mlp.experts.{e}.down_proj" for i in range(45) for e in range(100)]
    globs = [f"model.layers.{i}.{m}*" for i in range(122) for m in ("self_attn", "mlp.shared_experts")]
    globs += [f"*.layers.{i}.{m}.*" for i in range(122) for m in ("linear_attn", "indexer")]
    others = ["re:.*mlp.gate$", "re:.*self_attn.*", "*lm_head*", "*embed*", "*visual*", "*shared_head*", "lm_head"]
    patterns = (*names, *globs, *others)
    assert len(patterns) > 4990
    few = modules if kind == "tuple" else modules[::100]  # a list is hashed each time: for a hundredth in that time
    begin = time.process_time()
    covered = sum(matches_any(m, patterns if kind == "tuple" else list(patterns)) for m in few)
    assert time.process_time() - begin < 2.0
    assert covered == (4500 if kind == "tuple" else 45)


def test_published_lists_mean_what_their_own_reader_takes_them_for(shared_data):
    """ModelOpt's exporter writes fnmatch globs and names; on names of its own spelling the meanings agree."""
    compared = 0
    for file in sorted((shared_data / "metadata").glob("nvidia--*hf_quant_config.json")):
        content = json.loads(file.read_text())
        excludes = content.get("quantization", content).get("exclude_modules") or []
        modules = {p.replace("*", tail) for p in excludes for tail in ("", ".q_proj", "_x.y")}
        modules |= {m.replace(".1.", ".2.") for m in modules} | {"lm_head", "model.layers.2.mlp.experts.0.up_proj"}
        for module in sorted(modules):
            own = any(fnmatch.fnmatchcase(module, p) or module.startswith(p + ".") for p in excludes)
            assert matches_any(module, tuple(excludes)) == own, (file.name, module)
            compared += 1
    assert compared > 3000


@pytest.mark.parametrize("regex", ["(a+)+$", "(?:(?:x|y*)z)*", r"model\.(\w+\s?)*end"])
def test_a_regex_that_can_take_exponential_time_is_refused(regex):
    with pytest.raises(CheckpointError, match="repeats a repetition"):
        matches("model." + "a" * 40 + "!", f"re:{regex}")


@pytest.mark.parametrize(
    "regex",
    [
        r"(.*\.)?model\.layers\.\d+\.mlp$",
        r".*mlp\.(gate|up|gate_up|down)_proj.*",
        r"^(?!.*(vis|mm)).*$",
        "([a-z]{2,5})+",
    ],
)
def test_regexes_as_producers_write_them_compile(regex):
    matches("model.layers.0.mlp", f"re:{regex}")
