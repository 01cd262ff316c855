"""A causal language model run whole, in one process, with some of its matrices rounded: what reaches the answers.

    network = load_network(Path("mini_kimi"))
    baseline = network.baseline(windows)                                    # windows: lists of token ids, equally long
    with network.rounded({"model.layers.1.mlp.down_proj": Rounding("nvfp4")}):
        outcome = network.outcome(baseline, first_layer=1)

The architecture is transformers'; the weights are read and decoded by the workbench, from any dialect. Every matrix of
the checkpoint is looked up in the loaded model and must be found there bit for bit, also as a slice of a stack of
experts. Layers before the first changed one are not run again: their outputs are kept. Trade-off: the model lies in
memory as float32 (bfloat16 products would add noise of their own), beside the baseline's outputs and log-probabilities;
what does not fit is refused before anything is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workbench.errors import CheckpointError, ConfigError
from workbench.formats import get_format, global_scale, quantize

from .choice import stored_bits
from .device import check_device

Module = torch.nn.Module
BATCH_TOKENS, GPU_BATCH_TOKENS = 512, 4096
"""Tokens that are run at once: on a CPU few enough for its caches."""
_ROWS = 512  # positions whose distributions are compared at once


@dataclass(frozen=True, slots=True)
class Rounding:
    """What a matrix is rounded to: a format, its scale rule (None: the default) and block. activations: its inputs pass
    the format as well, where it is an activation format."""

    format: str
    rule: str | None = None
    block: tuple[int, int] | None = None
    activations: bool = False


@dataclass(slots=True)
class Power:
    """Noise and signal power of one place of the network, sums over positions and channels, `[windows]` each."""

    noise: NDArray[np.float64]
    signal: NDArray[np.float64]


@dataclass(slots=True)
class Outcome:
    """What rounding did, window by window, `[windows]` float64 each.

    kl: mean over positions of KL(baseline || rounded) of the next-token distribution, nats, over the whole vocabulary.
    same_top1: share of positions with the same likeliest token. logits: mean squared change of the log-probabilities.
    block, residual: at the sublayer that holds the changed matrices and after its layer (None: several layers
    changed); last: the residual stream after the last layer.
    """

    kl: NDArray[np.float64]
    same_top1: NDArray[np.float64]
    logits: NDArray[np.float64]
    block: Power | None
    residual: Power | None
    last: Power


@dataclass(slots=True)
class Baseline:
    """The unrounded run: by batch, token ids `[B, T]`, what every layer returned, what every sublayer added, and the
    log-probabilities `[B, T, V]`."""

    ids: list[Tensor] = field(default_factory=list)
    layers: list[dict[int, Any]] = field(default_factory=list)
    blocks: list[dict[str, Tensor]] = field(default_factory=list)
    logs: list[Tensor] = field(default_factory=list)


class Network:
    """A loaded model. modules: checkpoint modules that were found in it. layers: decoder layers by number."""

    def __init__(self, model: Any, places: dict[str, Tensor], stacks: dict[str, Module], layers: dict[int, Module]):
        self.model = model
        self.layers = layers
        self._places = places
        self._stacks = stacks

    @property
    def modules(self) -> set[str]:
        return set(self._places)

    def block_of(self, module: str) -> str:
        """The sublayer that holds a module: "model.layers.1.self_attn"."""
        head, _, tail = module.partition(".layers.")
        return f"{head}.layers.{'.'.join(tail.split('.')[:2])}"

    @contextmanager
    def rounded(self, roundings: Mapping[str, Rounding]) -> Iterator[dict[str, float]]:
        """Round these modules' weights (fused ones of one format share a global scale, as `workbench quantize` lets
        them), and their inputs where asked; undone at the end. Yields the stored bits of each. Raises FormatError
        naming the module."""
        kept: dict[str, Tensor] = {}
        bits: dict[str, float] = {}
        with ExitStack() as stack:
            stack.callback(lambda: [self._places[name].copy_(w) for name, w in kept.items()])
            shared = self._shared_scales(roundings)
            for name, how in roundings.items():
                place = self._places[name]
                w = place.contiguous().cpu()
                q = quantize(w, how.format, how.rule, block=how.block, global_scale=shared.get(name), name=name)
                kept[name] = place.clone()
                place.copy_(q.dequantize())
                bits[name] = stored_bits(q)
            inputs = {name: how for name, how in roundings.items() if how.activations and _activates(how.format)}
            if inputs:
                stack.enter_context(self._rounded_inputs(inputs))
            yield bits

    def baseline(self, windows: Sequence[Sequence[int]]) -> Baseline:
        """Run the windows (equally many token ids each) unrounded and keep what later runs are held against."""
        found = Baseline()
        most = BATCH_TOKENS if self.model.device.type == "cpu" else GPU_BATCH_TOKENS
        step = max(1, most // len(windows[0]))
        blocks = sorted({self.block_of(name) for name in self._places})
        for start in range(0, len(windows), step):
            ids = torch.tensor([list(w) for w in windows[start : start + step]], device=self.model.device)
            layers: dict[int, Any] = {}
            added: dict[str, Tensor] = {}
            with ExitStack() as stack:
                for number, layer in self.layers.items():
                    stack.enter_context(_kept_output(layer, layers, number))
                for name in blocks:
                    stack.enter_context(_kept_output(self.model.get_submodule(name), added, name, first=True))
                logits = self._logits(ids)
            found.ids.append(ids)
            found.layers.append(layers)
            found.blocks.append(added)
            found.logs.append(logits.log_softmax(-1))
        return found

    def outcome(self, baseline: Baseline, *, first_layer: int, block: str = "") -> Outcome:
        """Run the model as it is now over the baseline's windows. first_layer: nothing before it was changed. block:
        the sublayer to look at, "" where changes lie in several."""
        rows: list[tuple[Tensor, ...]] = []
        last = max(self.layers)
        for ids, layers, blocks, logs in zip(
            baseline.ids, baseline.layers, baseline.blocks, baseline.logs, strict=True
        ):
            now: dict[Any, Any] = {}
            with ExitStack() as stack:
                for number, layer in self.layers.items():
                    if number < first_layer:
                        stack.enter_context(_skipped(layer, layers[number]))
                stack.enter_context(_kept_output(self.layers[last], now, "last", first=True))
                if block:
                    stack.enter_context(_kept_output(self.layers[first_layer], now, "residual", first=True))
                    stack.enter_context(_kept_output(self.model.get_submodule(block), now, "block", first=True))
                logits = self._logits(ids)
            found = [*_divergence(logs, logits), *_power(_hidden(layers[last]), now["last"])]
            if block:
                found += _power(_hidden(layers[first_layer]), now["residual"])
                found += _power(blocks[block], now["block"])
            rows.append(tuple(found))
        columns = [np.concatenate([t.cpu().double().numpy() for t in column]) for column in zip(*rows, strict=True)]
        kl, same, change, last_noise, last_signal = columns[:5]
        residual = Power(*columns[5:7]) if block else None
        at_block = Power(*columns[7:9]) if block else None
        return Outcome(kl, same, change, at_block, residual, Power(last_noise, last_signal))

    def _logits(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.model(ids, use_cache=False).logits
        return logits.float()

    def _shared_scales(self, roundings: Mapping[str, Rounding]) -> dict[str, Tensor]:
        from workbench.checkpoints.names import fusion_group

        groups: dict[tuple[str, Rounding], list[str]] = {}
        for name, how in roundings.items():
            if get_format(how.format).has_global and (group := fusion_group(name)):
                groups.setdefault((group, how), []).append(name)
        shared: dict[str, Tensor] = {}
        for (_, how), names in groups.items():
            amax = torch.stack([self._places[name].abs().amax().cpu() for name in names]).amax()
            if bool(amax.isfinite()):
                shared |= dict.fromkeys(names, global_scale(how.format, how.rule, amax))
        return shared

    @contextmanager
    def _rounded_inputs(self, roundings: Mapping[str, Rounding]) -> Iterator[None]:
        with ExitStack() as stack:
            by_stack: dict[str, dict[str, Rounding]] = {}
            for name, how in roundings.items():
                if name in self._stacks:
                    container = name.partition(".experts.")[0] + ".experts"
                    by_stack.setdefault(container, {})[name.removeprefix(container + ".")] = how
                    continue
                handle = self.model.get_submodule(_in_model(name, self.model)).register_forward_pre_hook(
                    lambda _, args, how=how: (_rounded(args[0], how), *args[1:])
                )
                stack.callback(handle.remove)
            for container, within in by_stack.items():
                module = self._stacks[next(name for name in self._stacks if name.startswith(container + "."))]
                module.forward = _experts_forward(module, within)
                stack.callback(module.__dict__.pop, "forward")
            yield


def load_network(source: str | Path, *, device: str = "cpu", tokens: int = 0) -> Network:
    """Read a checkpoint (any dialect, a folder or hf://org/name) into transformers' model of its architecture.

    tokens: how many will be run, for the check that memory suffices. Raises CheckpointError where it does not, where
    transformers has no such architecture, lacks a tensor, or lays a matrix out in a way that is not recognized;
    ConfigError for a device that is not there.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    from workbench.checkpoints import open_checkpoint
    from workbench.checkpoints.selection import linear_weights

    check_device(device)
    with open_checkpoint(source) as checkpoint:
        entries = checkpoint.entries()
        _check_memory(source, checkpoint.config, sum(_count(e.shape) for e in entries), device, tokens)
        settings = {k: v for k, v in checkpoint.config.items() if k not in ("model_type", "quantization_config")}
        try:
            config = AutoConfig.for_model(str(checkpoint.config.get("model_type")), **settings)
            with torch.device("meta"):
                kind = type(AutoModelForCausalLM.from_config(config))
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"{source}: transformers has no causal language model for model_type"
                f" {checkpoint.config.get('model_type')!r}: {str(error).splitlines()[0]}",
                fix="measure it over an endpoint instead: `workbench logprobs` and `workbench kld`",
            ) from error
        state = {e.name: checkpoint.read_dense(e.name) for e in entries}
        matrices = [e for e in linear_weights(checkpoint)]
    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, report = kind.from_pretrained(
            None, config=config, state_dict=dict(state), dtype=torch.float32, output_loading_info=True
        )
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{source}: transformers cannot load it: {error}", fix="`workbench lint` says whether its shapes fit"
        ) from error
    finally:
        if bar:
            logging.enable_progress_bar()
    if report["missing_keys"]:
        raise CheckpointError(
            f"{source} lacks {len(report['missing_keys'])} tensors of {kind.__name__}, first:"
            f" {sorted(report['missing_keys'])[0]}",
            fix="give a whole checkpoint; `workbench lint` names what is missing",
        )
    model = model.eval().requires_grad_(False).to(device)
    places, stacks = {}, {}
    for entry in matrices:
        found = _find(model, entry, state.pop(entry.name))
        places[entry.module] = found[0]
        if found[1] is not None:
            stacks[entry.module] = found[1]
    layers = {}
    for entry in matrices:
        head = _in_model(entry.module, model).partition(".layers.")[0]
        layers[entry.layer] = model.get_submodule(f"{head}.layers.{entry.layer}")
    return Network(model, places, stacks, dict(sorted(layers.items())))


# ---- finding matrices ------------------------------------------------------------------------------------------------


def _find(model: Module, entry: Any, w: Tensor) -> tuple[Tensor, Module | None]:
    """A view of the loaded model that is this matrix, and the module of its stack where it is an expert's."""
    module = _in_model(entry.module, model)
    w = w.to(next(model.parameters()).device)
    parameters = dict(model.named_parameters())
    plain = parameters.get(f"{module}.weight")
    if plain is not None:
        if plain.shape == w.shape and torch.equal(plain, w):
            return plain.data, None
    elif entry.expert >= 0:
        container = module.partition(f".experts.{entry.expert}.")[0] + ".experts"
        try:
            stack = model.get_submodule(container)
        except AttributeError:
            stack = torch.nn.Module()
        for parameter in stack.parameters(recurse=False):
            if parameter.dim() == 3 and parameter.shape[0] > entry.expert:
                for view in _views(parameter.data[entry.expert], entry.projection):
                    if view.shape == w.shape and torch.equal(view, w):
                        return view, stack
    raise CheckpointError(
        f"{entry.name} is not found in transformers' {type(model).__name__} as it was read",
        fix="this architecture's layout is not supported here; measure over an endpoint (`workbench logprobs`, `kld`)",
    )


def _views(w: Tensor, projection: str) -> Iterator[Tensor]:
    """What an expert's slice of a stack may hold of one projection: all of it, a half, every other row, or those of its
    transpose."""
    for of in (w, w.T):
        half = len(of) // 2
        if projection in ("gate_proj", "w1"):
            yield from (of[:half], of[::2])
        elif projection in ("up_proj", "w3"):
            yield from (of[half:], of[1::2])
        yield of


def _in_model(module: str, model: Module) -> str:
    """A checkpoint's module name as the model has it: prefixes differ, what follows `layers.` does not."""
    head, dot, tail = module.partition(".layers.")
    if not dot:
        return module
    number = tail.split(".")[0]
    heads = [
        name.removesuffix(f".layers.{number}")
        for name, _ in model.named_modules()
        if name.endswith(f".layers.{number}")
    ]
    return module if head in heads or len(heads) != 1 else f"{heads[0]}.layers.{tail}"


# ---- memory ----------------------------------------------------------------------------------------------------------


def _check_memory(source: str | Path, config: Mapping[str, Any], values: int, device: str, tokens: int) -> None:
    """The model as read and as loaded (on a GPU: once there), the baseline's layers and distributions."""
    import psutil

    inner = config.get("text_config")
    of = inner if isinstance(inner, dict) else config
    width, layers, vocabulary = (int(of.get(k) or 0) for k in ("hidden_size", "num_hidden_layers", "vocab_size"))
    kept = 4 * tokens * (3 * layers * width + vocabulary) + 3 * 4 * min(tokens, GPU_BATCH_TOKENS) * vocabulary
    free_bytes = psutil.virtual_memory().available
    need = 8 * values + (kept if device == "cpu" else 0)
    where = "memory"
    if need <= free_bytes and device != "cpu":
        free_bytes, need, where = torch.cuda.mem_get_info(device)[0], 4 * values + kept, "the GPU's memory"
    if need > free_bytes:
        raise CheckpointError(
            f"{source}: {values / 1e9:.2f} billion weights in float32 with {tokens} tokens' outputs take about"
            f" {need / 1e9:.1f} GB of {where}, {free_bytes / 1e9:.1f} GB are free",
            fix="give fewer windows, a larger machine, or measure over an endpoint (`workbench logprobs`, `kld`)",
        )


def _count(shape: Sequence[int]) -> int:
    return int(np.prod(shape)) if shape else 1


# ---- running ---------------------------------------------------------------------------------------------------------


@contextmanager
def _kept_output(module: Module, into: dict[Any, Any], key: Any, *, first: bool = False) -> Iterator[None]:
    """Keep what the module returns under `key`; first: of several values the first (the hidden states)."""

    def keep(_: Module, __: Any, output: Any) -> None:
        into[key] = _hidden(output) if first else output

    handle = module.register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _skipped(module: Module, output: Any) -> Iterator[None]:
    """Return a kept output in place of running the module."""
    module.forward = lambda *_, **__: output
    try:
        yield
    finally:
        del module.__dict__["forward"]


def _hidden(output: Any) -> Tensor:
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def _divergence(logs: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(mean KL, share of the same likeliest token, mean squared change of the log-probabilities), `[windows]` each."""
    found = []
    for p, q in zip(logs.flatten(0, 1).split(_ROWS), logits.flatten(0, 1).split(_ROWS), strict=True):
        change = p - q.log_softmax(-1)
        same = (p.argmax(-1) == q.argmax(-1)).float()
        found.append(torch.stack([(p.exp() * change).sum(-1), same, change.square().mean(-1)]))
    values = torch.cat(found, dim=1).double().unflatten(1, logs.shape[:2]).mean(-1)
    return values[0].clamp(min=0.0), values[1], values[2]


def _power(exact: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over a window of the squared change and of the square, float64 `[windows]`."""
    exact = exact.reshape(len(now), -1)
    return (now.reshape(len(now), -1) - exact).double().square().sum(1), exact.double().square().sum(1)


def _activates(format: str) -> bool:
    return get_format(format).qdq_activation is not None


def _rounded(x: Tensor, how: Rounding) -> Tensor:
    spec = get_format(how.format)
    assert spec.qdq_activation is not None
    return spec.qdq_activation(x.flatten(0, -2).contiguous(), spec.rule(None), None).view(x.shape)


def _experts_forward(stack: Any, roundings: Mapping[str, Rounding]) -> Any:
    """transformers' loop over a stack's experts, with the inputs of some projections rounded. Raises ConfigError where
    the stack has another shape than gate and up in one, and down."""
    if not all(hasattr(stack, name) for name in ("gate_up_proj", "down_proj", "act_fn")):
        raise ConfigError(
            f"{type(stack).__name__} computes its experts in a way that is not known here",
            fix="leave the activations unrounded",
        )

    def visit(name: str, x: Tensor) -> Tensor:
        return _rounded(x, roundings[name]) if name in roundings else x

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for e in top_k_index.unique().tolist():
            if e >= len(stack.down_proj):
                continue
            token, position = torch.where(top_k_index == e)
            x = hidden_states[token]
            gate_w, up_w = stack.gate_up_proj[e].chunk(2)
            hidden = stack.act_fn(visit(f"{e}.gate_proj", x) @ gate_w.T) * (visit(f"{e}.up_proj", x) @ up_w.T)
            y = visit(f"{e}.down_proj", hidden) @ stack.down_proj[e].T
            out.index_add_(0, token, y * top_k_weights[token, position, None])
        return out

    return forward
