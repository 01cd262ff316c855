"""Do 95 % intervals hold the truth 95 times in 100? Simulated matrices of known distributions; docs/analysis.md has the
table. Not a test by itself (minutes): `python tests/analysis/simulate_intervals.py --matrices 4000`.

Every matrix is drawn independently under one fixed global scale, so that the true figures are those of all matrices
pooled; with 4,000 matrices the truth is known some 60 times better than one matrix's interval is wide.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from workbench.analysis.algebra import Sides, measure_sides
from workbench.analysis.figures import COLUMNS, WITH_INTERVAL, figures_of_sums
from workbench.analysis.sides import DenseSide, RoundedSide, StoredSide
from workbench.formats import quantize

ROWS, K, SIGMA = 32, 512, 0.02
# Largest magnitude that the fixed global scale reaches, in sigma: what such matrices have at most, so none saturates.
REACH = {"gaussian": 4.8, "student5": 60.0, "laplace": 16.0}


def draw(distribution: str, rng: np.random.Generator) -> torch.Tensor:
    """One matrix `[32, 512]`, float32, of standard deviation 0.02."""
    if distribution == "laplace":
        values = rng.laplace(size=(ROWS, K)) / np.sqrt(2)
    elif distribution == "student5":
        values = rng.standard_t(5, size=(ROWS, K)) / np.sqrt(5 / 3)
    else:
        values = rng.standard_normal((ROWS, K))
    return torch.from_numpy((SIGMA * values).astype(np.float32))


def coverage(
    distribution: str, matrices: int, seed: int = 0, reach: float = 0.0
) -> dict[str, tuple[float, float, float]]:
    """By figure: share of matrices whose interval holds the truth, share whose interval is said to be doubtful, and
    the median width. reach: in place of REACH's."""
    rng = np.random.default_rng(seed)
    scale = torch.tensor(SIGMA * (reach or REACH[distribution]) / 2688)
    lows, highs, doubtful, sums = [], [], [], np.zeros(len(COLUMNS))
    for index in range(matrices):
        source = DenseSide(draw(distribution, rng))
        first = StoredSide(quantize(source.values, "nvfp4", global_scale=scale))
        sides = Sides(
            source=source,
            first=first,
            second=RoundedSide(first, "mxfp4", "even", "simulated"),
            direct=RoundedSide(source, "mxfp4", "even", "simulated"),
        )
        found = measure_sides(sides, name=str(index))
        lows.append([found.figures[f"{key}_low"] for key in WITH_INTERVAL])
        highs.append([found.figures[f"{key}_high"] for key in WITH_INTERVAL])
        doubtful.append([key in found.doubtful for key in WITH_INTERVAL])
        sums += found.sums
    truth = figures_of_sums(sums[None], only=WITH_INTERVAL)
    true = np.array([truth[key][0] for key in WITH_INTERVAL])
    held = (np.array(lows) <= true) & (true <= np.array(highs))
    shares = held.mean(axis=0), np.mean(doubtful, axis=0), np.median(np.array(highs) - np.array(lows), axis=0)
    return dict(zip(WITH_INTERVAL, zip(*(part.tolist() for part in shares), strict=True), strict=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--matrices", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--reach", type=float, default=0.0, help="of the global scale, in sigma; below REACH: saturation"
    )
    parser.add_argument("--distribution", action="append", choices=["gaussian", "student5", "laplace"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.distribution or ["gaussian", "student5", "laplace"]:
        for key, (held, doubtful, width) in coverage(
            name, arguments.matrices, arguments.seed, reach=arguments.reach
        ).items():
            print(
                f"{name} {key}: {100 * held:.2f} % held, {100 * doubtful:.1f} % doubtful, width {width:.4g}", flush=True
            )
