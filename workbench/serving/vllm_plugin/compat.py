"""`compat: vllm`: the scales that vLLM itself would take from a ModelOpt NVFP4 checkpoint, to show what they cost.

The default, `none`, keeps what the checkpoint stores: a global scale of its own for every fused matrix and every
expert's gate, up and down, and an input scale for each. vLLM has one slot for several of them. What it puts there,
read in vLLM 0.26.0 and 0.32.0 (paths below vllm/model_executor; "global" is weight_scale_2):

- Linear layers, every kernel (emulation, Marlin, CUTLASS): the largest global of q, k, v (gate, up; q_a, kv_a) for all
  of their rows, and the largest input scale. 0.26.0: layers/quantization/modelopt.py,
  ModelOptNvFp4LinearMethod.process_weights_after_loading; 0.32.0: the same file, the two functions that warn about
  globals that differ across fused layers. Marlin (weight-only) reads the same global and drops the input scale.
- Experts, every kernel: the gate's (w1's) global for the up projection too, each expert keeping its own:
  ModelOptNvFp4FusedMoE.process_weights_after_loading, `w13_weight_scale_2[:, 0]`. The down projection keeps its own.
- Experts' input scales under emulation: the largest over all experts and over gate and up, and the largest of the down
  projections: layers/fused_moe/oracle/nvfp4.py, convert_to_nvfp4_moe_kernel_format, branch EMULATION. FlashInfer's
  kernels with one scale for all take the same (layers/quantization/utils/flashinfer_fp4_moe.py); its others the
  larger of each expert's gate and up; Marlin none.

Codes and block scales stay as they are, so a matrix whose global was replaced is multiplied by the quotient of the two.
Under expert parallelism the largest is taken over the experts of a rank, as there. Modules that have no input scale
keep each token's own (vLLM would refuse them or read uninitialized memory).
"""

from __future__ import annotations

import torch
from torch import Tensor


def linear_scale(scale: Tensor) -> Tensor:
    """One scale for all fused matrices: `[S]` to `[1]`, the largest; NaN (none) only where all are."""
    return _largest(scale).reshape(1)


def expert_globals(w13_global: Tensor) -> Tensor:
    """`[E, 2]` (gate, up): the gate's for both."""
    return w13_global[:, :1].expand(-1, 2).contiguous()


def expert_input_scale(scale: Tensor) -> Tensor:
    """One input scale for all experts: `[E]` or `[E, 2]` to `[1]`, the largest; NaN (none) only where all are."""
    return _largest(scale).reshape(1)


def _largest(scale: Tensor) -> Tensor:
    return torch.where(scale.isnan().all(), torch.nan, scale.nan_to_num(nan=-torch.inf).amax())
