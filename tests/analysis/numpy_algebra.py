"""The error algebra once more, in plain numpy float64, sharing no code with the product: the oracle of its tests."""

from __future__ import annotations

import numpy as np

GRID = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def round_e2m1(x: np.ndarray) -> np.ndarray:
    """Nearest E2M1 value; of two equally near ones the one with the even index."""
    distance = np.abs(np.abs(x)[..., None] - GRID)
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # argmin takes the first of equals: even indices come first
    return np.sign(x) * GRID[order[np.argmin(distance[..., order], axis=-1)]]


def decode_e4m3(byte: np.ndarray) -> np.ndarray:
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent.astype(float) - 7))
    return np.where(byte >> 7, -value, value)


def decode_nvfp4(packed: np.ndarray, scales: np.ndarray, multiplier: float) -> tuple[np.ndarray, np.ndarray]:
    """Values `[N, K]` and steps `[N, K/16]`; each product is rounded to float32 once, as the format is decoded."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    values = np.where(codes >> 3, -1.0, 1.0) * GRID[codes & 7]
    steps = (decode_e4m3(scales) * np.float64(np.float32(multiplier))).astype(np.float32).astype(np.float64)
    return (values * np.repeat(steps, 16, axis=1)).astype(np.float32).astype(np.float64), steps


def encode_mxfp4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values and steps `[N, K/32]` under the rule even."""
    blocks = x.reshape(len(x), -1, 32)
    amax = np.abs(blocks).max(-1)
    mantissa, exponent = np.frexp(amax)
    k = exponent - 1 - 2 + (2 * mantissa >= 1.75)
    steps = np.where(amax > 0, 2.0**k, 2.0**-127)
    values = np.clip(blocks / steps[..., None], -8, 8)
    return (round_e2m1(values) * steps[..., None]).reshape(x.shape), steps


def attribution(x: np.ndarray, x_hat: np.ndarray, steps: np.ndarray) -> dict[str, float]:
    """Mean squares by cause and shares of elements."""
    block = x.shape[1] // steps.shape[1]
    limit = np.repeat(6 * steps, block, axis=1)
    squares = (x_hat - x) ** 2
    beyond = np.abs(x) > limit
    lost = (x_hat == 0) & (x != 0) & ~beyond
    exact = np.repeat(np.abs(x).reshape(len(x), -1, block).max(-1), block, axis=1) / 6
    exact = np.where(exact == 0, 1, exact)
    ideal = (round_e2m1(x / exact) * exact - x) ** 2
    kept = ~(beyond | lost)
    parts = {
        "error_saturation": squares[beyond].sum() / x.size,
        "error_underflow": squares[lost].sum() / x.size,
        "error_element": ideal[kept].sum() / x.size,
    }
    parts["error_scale"] = squares.mean() - sum(parts.values())
    return parts | {"saturated": beyond.mean(), "underflowed": lost.mean()}


def figures(w: np.ndarray, a: np.ndarray, b: np.ndarray, d: np.ndarray) -> dict[str, float]:
    """Every point figure of a row, from the definitions."""
    e1, e2, e, ed = a - w, b - a, b - w, d - w

    def db(signal: np.ndarray, power: float) -> float:
        return float(10 * np.log10(np.mean(signal**2) / power))

    def corr(x: np.ndarray, y: np.ndarray) -> float:
        return float(np.corrcoef(x.ravel(), y.ravel())[0, 1])

    ww = np.sum(w * w)
    centred = e2 - e2.mean()
    p1, p2, p = np.mean(e1**2), np.mean(e2**2), np.mean(e**2)
    total = db(w, p)
    quadrature = db(w, p1 + p2)
    linear = db(w, p1 + p2 + 2 * np.mean(e1 * e2))
    return {
        "power_source": np.mean(w**2),
        "power_first": np.mean(a**2),
        "power_e1": p1,
        "power_e2": p2,
        "power_total": p,
        "power_direct": np.mean(ed**2),
        "mean_source": w.mean(),
        "mean_first": a.mean(),
        "mean_e1": e1.mean(),
        "mean_total": e.mean(),
        "mean_direct": ed.mean(),
        "cross_source_e1": np.mean(w * e1),
        "cross_source_total": np.mean(w * e),
        "cross_source_direct": np.mean(w * ed),
        "cross_e1_e2": np.mean(e1 * e2),
        "cross_first_e2": np.mean(a * e2),
        "sqnr_first_db": db(w, p1),
        "sqnr_second_db": db(a, p2),
        "sqnr_total_db": total,
        "sqnr_direct_db": db(w, np.mean(ed**2)),
        "sqnr_total_predicted_quadrature_db": quadrature,
        "sqnr_total_predicted_linear_db": linear,
        "residual_quadrature_db": total - quadrature,
        "residual_linear_db": total - linear,
        "cov_e1_e2": np.cov(e1.ravel(), e2.ravel(), bias=True)[0, 1],
        "cov_e1_e2_share": 2 * np.cov(e1.ravel(), e2.ravel(), bias=True)[0, 1] / p,
        "corr_e1_e2": corr(e1, e2),
        "corr_e2_a": corr(e2, a),
        "corr_e1_w": corr(e1, w),
        "gain_first": np.sum(w * a) / ww,
        "gain_total": np.sum(w * b) / ww,
        "gain_direct": np.sum(w * d) / ww,
        "gain_total_excess": np.sum(w * b) / ww - (1 - p / np.mean(w**2)),
        "e2_mean": e2.mean(),
        "e2_std": e2.std(),
        "e2_mean_over_std": e2.mean() / e2.std(),
        "e2_skewness": np.mean(centred**3) / e2.std() ** 3,
        "e2_excess_kurtosis": np.mean(centred**4) / e2.std() ** 4 - 3,
    }


def intervals(
    w: np.ndarray, a: np.ndarray, b: np.ndarray, d: np.ndarray, block: int = 32
) -> dict[str, tuple[float, float]]:
    """95 % intervals by leaving out one block at a time, from the definitions: the spread, skewness and kurtosis of the
    blocks' pseudo-values, Hall's transformation, Student's t."""
    from scipy.stats import kurtosis, skew, t

    parts = [x.reshape(-1, block) for x in (w, a, b, d)]
    whole = figures(w, a, b, d)
    keys = ("sqnr_first_db", "sqnr_total_db", "sqnr_direct_db", "corr_e1_e2", "cov_e1_e2_share", "gain_total_excess")
    n = len(parts[0])
    without = [figures(*(np.delete(part, i, axis=0) for part in parts)) for i in range(n)]
    found = {}
    for key in keys:
        left = np.array([f[key] for f in without])
        pseudo = (n - 1) * (left.mean() - left)
        error = pseudo.std() / np.sqrt(n - 1)
        c = skew(pseudo) / np.sqrt(n)
        quantile = t.ppf(0.975, 2 * n / (kurtosis(pseudo, fisher=False) - 1))
        low, high = (3 / c * (np.cbrt(1 + c * (x - c / 6)) - 1) for x in (quantile, -quantile))
        found[key] = whole[key] - error * low, whole[key] - error * high
    return found


def code_asymmetry(a: np.ndarray, b: np.ndarray, steps: np.ndarray) -> float:
    """Largest score over the magnitudes 0.5 to 6 of the second's codes."""
    codes = b / np.repeat(steps, 32, axis=1)
    e2, scores = b - a, []
    for magnitude in GRID[1:]:
        plus, minus = e2[codes == magnitude], e2[codes == -magnitude]
        if min(len(plus), len(minus)) >= 8:
            error = np.sqrt(plus.var() / len(plus) + minus.var() / len(minus))
            scores.append(abs(plus.mean() + minus.mean()) / error)
    return max(scores)


def natural_scale(name: str, of: dict[str, float]) -> float:
    """What an error of a figure is small against: the power, sigma or 1 that it is made from."""
    sigma = {
        "source": "power_source",
        "first": "power_first",
        "e1": "power_e1",
        "total": "power_total",
        "direct": "power_direct",
    }
    kind, _, rest = name.partition("_")
    if kind == "power":
        return of[name]
    if kind == "mean":
        return of[sigma[rest]] ** 0.5
    if name in ("e2_mean", "e2_std"):
        return of["power_e2"] ** 0.5
    if kind == "cov" and not name.endswith("share"):
        return (of["power_e1"] * of["power_e2"]) ** 0.5
    if kind == "cross":
        one, _, two = rest.partition("_")
        return (of[sigma[one]] * of[sigma.get(two, "power_e2")]) ** 0.5
    return 1.0
