"""The same model in transformers, float32, with its linear inputs rounded or recorded by plain hooks: the oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

Visit = Callable[[str, Tensor], Tensor]  # (checkpoint module, its input rows) -> what the module multiplies


def prompt_logprobs(path: Path, prompts: list[list[int]], visit: Visit) -> Tensor:
    """Log-probabilities of every prompt token after the first, float64, prompts one after the other."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda m, args, name=name: (visit(name, args[0]), *args[1:]))
        elif name.endswith("mlp.experts"):
            module.forward = _experts_forward(name, module, visit)
    values = []
    with torch.no_grad():
        for prompt in prompts:
            logits = model(torch.tensor([prompt])).logits[0].double()
            chosen = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])
            values.append(chosen.squeeze(1))
    return torch.cat(values)


def _experts_forward(name: str, experts: torch.nn.Module, visit: Visit) -> Callable:
    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        inter = experts.gate_up_proj.shape[1] // 2
        for e in top_k_index.unique().tolist():
            token, position = torch.where(top_k_index == e)
            x = hidden_states[token]
            gate_w, up_w = experts.gate_up_proj[e].split(inter)
            gate = visit(f"{name}.{e}.gate_proj", x) @ gate_w.T
            up = visit(f"{name}.{e}.up_proj", x) @ up_w.T
            hidden = visit(f"{name}.{e}.down_proj", experts.act_fn(gate) * up)
            y = (hidden @ experts.down_proj[e].T) * top_k_weights[token, position, None]
            out.index_add_(0, token, y)
        return out

    return forward
