"""From measured activation magnitudes to every quantized module's `input_scale`.

    formats = {"model.layers.1.mlp.experts.3.gate_proj": "nvfp4", ...}
    scales, notes = resolve_input_scales(formats, {"model.layers.1.mlp.experts.3.gate_proj": 4.2, ...})

input_scale is the decode multiplier of static activations as ModelOpt writes it: amax / (6 * 448) for NVFP4, amax / 448
where activations are FP8. Modules that servers fuse (gate/up, q/k/v, q_a/kv_a) share the largest amax. A module without
a measurement, above all an expert that no calibration token reached, takes:
1. the largest amax of the same projection over the other experts of its layer;
2. else ModelOpt's fallback amax 0.5 for an expert whose whole layer saw nothing.
A zero, negative or non-finite amax, or one whose scale float32 cannot hold, counts as missing. A module outside the
experts must have been measured. Source: nvidia-modelopt 0.47.0, `set_expert_quantizer_amax` (max over the calibrated
experts, else 0.5).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from workbench.errors import CheckpointError
from workbench.kernels.tables import E2M1_MAX, E4M3_MAX

from .names import expert_peers, fusion_group

FALLBACK_AMAX = 0.5
# Formats whose activations may be scaled statically -> the largest activation that input_scale 1 represents.
ACTIVATION_MAX = {"nvfp4": E2M1_MAX * E4M3_MAX, "nvfp4_w4a8": E4M3_MAX, "fp8_tensor": E4M3_MAX}
SMALLEST_AMAX = 2.0**-126 * max(ACTIVATION_MAX.values())  # float32's least normal number as a scale


def resolve_input_scales(
    formats: Mapping[str, str], input_amax: Mapping[str, float], *, shared: bool = True
) -> tuple[dict[str, float], list[str]]:
    """Decode multipliers for the modules of `formats` (module -> format) and sentences about the ones filled in.

    Modules of a format without static activations (`ACTIVATION_MAX`) get none. shared: fused modules take their group's
    largest amax. Raises CheckpointError for a module that is no expert and has no usable measurement.
    """
    modules = [module for module, format in formats.items() if format in ACTIVATION_MAX]
    amax = {m: float(input_amax[m]) for m in modules if _usable(input_amax.get(m))}
    if shared:
        amax = _share(modules, amax)
    peers: dict[str, float] = {}
    for module, value in amax.items():
        peers[expert_peers(module)] = max(value, peers.get(expert_peers(module), 0.0))
    from_peers: list[str] = []
    from_fallback: list[str] = []
    for module in modules:
        if module in amax:
            continue
        key = expert_peers(module)
        if key == module:
            raise CheckpointError(
                f"{module} has no measured input amax, and it is no expert that others could stand in for",
                fix="calibrate on more text, or exclude the module",
            )
        (from_peers if key in peers else from_fallback).append(module)
        amax[module] = peers.get(key, FALLBACK_AMAX)
    notes = []
    if from_peers:
        notes.append(
            f"{len(from_peers)} expert projections saw no calibration token; they take the largest input amax of their"
            f" layer's other experts (first: {from_peers[0]})"
        )
    if from_fallback:
        notes.append(
            f"{len(from_fallback)} expert projections are in layers where no expert saw a token; they take input amax"
            f" {FALLBACK_AMAX} (first: {from_fallback[0]})"
        )
    return {m: amax[m] / ACTIVATION_MAX[formats[m]] for m in modules}, notes


def _usable(value: float | None) -> bool:
    return value is not None and SMALLEST_AMAX <= value < math.inf


def _share(modules: list[str], amax: dict[str, float]) -> dict[str, float]:
    largest: dict[str, float] = {}
    for module, value in amax.items():
        group = fusion_group(module)
        if group is not None:
            largest[group] = max(value, largest.get(group, 0.0))
    shared = {}
    for module in modules:
        group = fusion_group(module)
        if group in largest:
            shared[module] = largest[group]
        elif module in amax:
            shared[module] = amax[module]
    return shared
