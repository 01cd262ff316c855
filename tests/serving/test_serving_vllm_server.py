"""One real server over HTTP: `start` with the real command line, and the refusals that need vLLM's classes."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
from tiny_models import make_prompts

from workbench.errors import EngineError, FormatError
from workbench.serving.endpoint import start
from workbench.serving.spec import EngineSpec, ServeSpec

pytestmark = pytest.mark.vllm


def test_a_real_server_emulates_and_tells_what_it_is(checkpoints, tmp_path):
    import httpx

    engine = EngineSpec(max_model_len=256, args={"max_num_seqs": 4}, startup_timeout_s=300)
    spec = ServeSpec(arm="tiny", checkpoint=checkpoints / "deepseek_nvfp4", backend="emulation", engine=engine)
    ask = {"prompt": make_prompts(2), "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    with start(spec, tmp_path / "server.log") as endpoint:
        url = f"{endpoint.base_url}/completions"
        answer = httpx.post(url, json={**ask, "model": endpoint.model}, timeout=60, trust_env=False)
        record = endpoint.record()
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert record.weight_format.startswith("nvfp4")
    assert record.activation_scale == "dynamic_per_token"
    assert record.engine_version.startswith("vllm")
    assert 0 < record.load_s < record.ready_s
    assert 2**29 < record.peak_rss_bytes < 6 * 2**30
    assert record.args == engine.args
    assert record.command[1:3] == ("-m", "vllm.entrypoints.openai.api_server")


def test_an_unknown_architecture_is_named(checkpoints, tmp_path):
    folder = tmp_path / "unknown"
    shutil.copytree(checkpoints / "qwen", folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("Qwen3MoeForCausalLM", "NobodysForCausalLM"))
    engine = EngineSpec(startup_timeout_s=300)
    with pytest.raises(EngineError, match="NobodysForCausalLM") as caught:
        start(ServeSpec(arm="x", checkpoint=folder, engine=engine), tmp_path / "log")
    assert "architecture" in caught.value.fix


def test_a_block_split_between_ranks_is_refused():
    from workbench.serving.vllm_plugin.linear import check_block

    check_block("model.layers.0.mlp.down_proj", 64, 2, "mxfp4")
    with pytest.raises(FormatError, match=r"down_proj: K per rank is 48 .*size 2.*block of 32") as caught:
        check_block("model.layers.0.mlp.down_proj", 48, 2, "mxfp4")
    assert "tensor_parallel_size" in caught.value.fix


def test_fused_modules_that_disagree_are_refused(checkpoints, tmp_path):
    from workbench.errors import ConfigError
    from workbench.serving.vllm_plugin.config import WorkbenchConfig
    from workbench.serving.vllm_plugin.settings import PluginSettings

    settings = PluginSettings(
        checkpoint=str(checkpoints / "qwen_nvfp4"), backend="emulation", exclude=("*.self_attn.k_proj",)
    )
    config = WorkbenchConfig(settings)
    with pytest.raises(ConfigError, match=r"qkv_proj: vLLM runs 3 modules as one.*unquantized"):
        config._linear_method("model.layers.0.self_attn.qkv_proj")
    everything = WorkbenchConfig(dataclasses.replace(settings, exclude=("*.self_attn.*",)))
    assert type(everything._linear_method("model.layers.0.self_attn.o_proj")).__name__ == "UnquantizedLinearMethod"
