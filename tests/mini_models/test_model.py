"""The trainer's model: export and load, noise of a stated power, and experts that round as an arm does."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from workbench.kernels import reference
from workbench.mini_models import measure
from workbench.mini_models.model import build_model, change_linears, export, load, mixture_layers, unchanged, with_noise

TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}


@pytest.fixture(params=["mini_kimi", "mini_qwen"])
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    torch.manual_seed(0)
    model = build_model(request.param, **TINY).eval()
    model.kind = request.param
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(5, 25)[None], use_cache=False).logits


def test_an_exported_checkpoint_is_loaded_back(model: torch.nn.Module, tmp_path: Path) -> None:
    export(model, tmp_path)
    other = build_model(model.kind, **TINY)
    load(other, tmp_path)
    for name, tensor in model.state_dict().items():
        kept = tensor if name.endswith("bias") else tensor.bfloat16().float()
        assert torch.equal(other.state_dict()[name], kept), name


@pytest.mark.parametrize("snr_db", [10.0, 16.0])
def test_noise_has_the_stated_power_and_passes_the_gradient(snr_db: float) -> None:
    torch.manual_seed(0)
    t = torch.randn(400, 256) * torch.logspace(-3, 3, 400)[:, None]
    t.requires_grad_()
    noisy = with_noise(t, snr_db)
    ratio = t.square().mean(-1) / (noisy - t).square().mean(-1)
    assert (10 * ratio.log10()).mean().item() == pytest.approx(snr_db, abs=0.1)
    noisy.sum().backward()
    assert torch.equal(t.grad, torch.ones_like(t))


def test_a_change_reaches_every_projection_of_the_recipe_and_ends(model: torch.nn.Module) -> None:
    exact, noisy = logits(model), partial(with_noise, snr_db=10.0)
    change_linears(model, noisy, noisy)
    assert not torch.equal(logits(model), exact)
    changed = [m for m in model.modules() if getattr(m, "on_weight", unchanged) is not unchanged]
    # Gate, up, down of the dense layer and of the shared expert, and the experts; or seven projections of two layers.
    assert len(changed) == (7 if model.kind == "mini_kimi" else 14)
    change_linears(model, unchanged, unchanged)
    assert torch.equal(logits(model), exact)


@pytest.mark.parametrize("arm", ["nvfp4", "nvfp4_to_mxfp4"])
def test_a_quantized_model_rounds_as_the_arm_does_and_only_inside(model: torch.nn.Module, arm: str) -> None:
    exact = logits(model)
    with measure.quantized(model, arm):
        rounded = logits(model)
    assert not torch.equal(rounded, exact)
    assert torch.equal(logits(model), exact)

    def on_weight(w_nk: torch.Tensor) -> torch.Tensor:
        if w_nk.dim() == 3:
            return torch.stack([on_weight(w) for w in w_nk])
        w_hat_nk = reference.nvfp4_dequantize(*reference.nvfp4_quantize(w_nk))
        return w_hat_nk if arm == "nvfp4" else reference.mxfp4_dequantize(*reference.mxfp4_quantize(w_hat_nk))

    on_input = reference.nvfp4_qdq_activation if arm == "nvfp4" else reference.mxfp4_qdq_activation
    for module in mixture_layers(model) or [m for m in model.model.layers.modules() if hasattr(m, "weight")]:
        if isinstance(module, torch.nn.Linear):
            module.weight.data = on_weight(module.weight)
            module.register_forward_pre_hook(lambda _, args: (on_input(args[0]),))
        elif hasattr(module, "experts"):
            for parameter in (module.experts.gate_up_proj, module.experts.down_proj):
                parameter.data = on_weight(parameter)
            module.on_input = on_input
    torch.testing.assert_close(logits(model), rounded, rtol=0, atol=0)
