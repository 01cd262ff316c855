"""How often the rule, its bound and its intervals are right: the tables of docs/statistics.md.

    python tests/statistics/simulate.py                 # 4,000 experiments a line, about a minute
    python tests/statistics/simulate.py --draws 400     # quick look

The rule's own table has 25 times as many: at 4,000 a share near 80 % is known to 1.2 points only. An experiment draws
the 2x2 table of n items from a true discordance and a true loss, and is then judged as the gate judges. Columns marked
`exact` are no simulation: they sum the probabilities of all tables.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable

import numpy as np
from scipy.stats import beta, binom, norm

from workbench.statistics import (
    ALPHA,
    clustered_loss,
    holm,
    loss_interval,
    loss_upper_bound,
    mcnemar_exact,
    noninferiority_pvalue,
    recovery_interval,
)
from workbench.statistics.paired import score_statistic

N = 1319
MARGIN = 0.01
BASELINE = 0.90
Z95, Z = float(norm.ppf(0.95)), float(norm.ppf(0.975))


def draw(rng: np.random.Generator, n: int, discordance: float, loss: float, draws: int) -> np.ndarray:
    """Tables of shape (draws, 4): both right, lost, gained, neither; the baseline has BASELINE right."""
    lost, gained = (discordance + loss) / 2, (discordance - loss) / 2
    both = BASELINE - lost
    return rng.multinomial(n, [both, lost, gained, 1 - both - lost - gained], size=draws)


class Rule:
    """The gate's rule at n items and one margin, tabulated: a table passes up to `most_lost[gained]` losses."""

    def __init__(self, n: int, margin: float, most_gained: int = 180) -> None:
        self.n, self.margin = n, margin
        self.most_lost = np.full(most_gained + 1, -1)
        for gained in range(most_gained + 1):  # one more gain never makes a passing table fail
            lost = self.most_lost[gained - 1] if gained else -1
            while lost < n - gained and noninferiority_pvalue(int(lost) + 1, gained, n, margin) < ALPHA:
                lost += 1
            self.most_lost[gained] = lost
        pairs = np.arange(0, n + 1)
        self.least_significant = (binom.isf(ALPHA, pairs, 0.5) + 1).astype(int)

    def passes(self, lost: np.ndarray, gained: np.ndarray) -> np.ndarray:
        return lost <= self.most_lost[np.minimum(gained, len(self.most_lost) - 1)]

    def fails(self, lost: np.ndarray, gained: np.ndarray) -> np.ndarray:
        return (lost >= self.least_significant[lost + gained]) & (lost - gained > self.margin * self.n + 1e-9)


def exact(n: int, discordance: float, loss: float, event: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> float:
    """Probability of an event of (lost, gained), summed over all tables that matter."""
    spread = 8.0 * math.sqrt(n * discordance * (1 - discordance)) + 12
    pairs = np.arange(max(0, int(n * discordance - spread)), min(n, int(n * discordance + spread)) + 1)
    lost, total = np.meshgrid(np.arange(0, pairs[-1] + 1), pairs, indexing="ij")
    share = 0.5 * (1 + loss / discordance)
    weight = binom.pmf(total, n, discordance) * binom.pmf(lost, total, share)
    possible = lost <= total
    gained = np.where(possible, total - lost, 0)
    return float(np.sum(weight[possible & event(lost, gained)]))


# ---- intervals that were considered: do they cover? ------------------------------------------------------------------


def covers_tango(table: np.ndarray, n: int, loss: float) -> np.ndarray:
    return tango_holds(table[:, 1], table[:, 2], n, loss)


def tango_holds(lost: np.ndarray, gained: np.ndarray, n: int, loss: float) -> np.ndarray:
    """Whether the interval holds the true loss: the test that it inverts does not reject it."""
    return np.abs(score_statistic(lost, gained, n, loss)) <= Z


def covers_wald(table: np.ndarray, n: int, loss: float) -> np.ndarray:
    return _normal(table[:, 1], table[:, 2], n, loss)


def covers_agresti_min(table: np.ndarray, n: int, loss: float) -> np.ndarray:
    """Half a flip more in each direction and two items more, then Wald's interval."""
    return _normal(table[:, 1] + 0.5, table[:, 2] + 0.5, n + 2, loss)


def covers_newcombe(table: np.ndarray, n: int, loss: float) -> np.ndarray:
    """Square-and-add with Wilson limits and the phi correlation (Newcombe 1998, method 10)."""
    both, lost, gained, neither = table.T.astype(float)
    p1, p2 = (both + lost) / n, (both + gained) / n
    l1, u1, l2, u2 = (*_wilson(p1, n), *_wilson(p2, n))
    product = (both + lost) * (gained + neither) * (both + gained) * (lost + neither)
    top = both * neither - lost * gained
    top = np.where(top > n / 2, top - n / 2, np.where(top < 0, top, 0.0))
    phi = np.where(product > 0, top / np.sqrt(np.maximum(product, 1)), 0.0)
    low_square = (p1 - l1) ** 2 - 2 * phi * (p1 - l1) * (u2 - p2) + (u2 - p2) ** 2
    high_square = (p2 - l2) ** 2 - 2 * phi * (p2 - l2) * (u1 - p1) + (u1 - p1) ** 2
    return (p1 - p2 - np.sqrt(low_square) <= loss + 1e-12) & (loss - 1e-12 <= p1 - p2 + np.sqrt(high_square))


def covers_conditional(table: np.ndarray, n: int, loss: float) -> np.ndarray:
    """Clopper-Pearson for the share of losses among flips, times the observed discordance."""
    lost, gained = table[:, 1], table[:, 2]
    low = np.where(lost > 0, beta.ppf(0.025, np.maximum(lost, 1), gained + 1), 0.0)
    high = np.where(gained > 0, beta.ppf(0.975, lost + 1, np.maximum(gained, 1)), 1.0)
    pairs = (lost + gained) / n
    return (pairs * (2 * low - 1) <= loss + 1e-12) & (loss - 1e-12 <= pairs * (2 * high - 1))


INTERVALS = {
    "Tango's score": covers_tango,
    "Wald": covers_wald,
    "Agresti-Min": covers_agresti_min,
    "Newcombe 10": covers_newcombe,
    "conditional exact": covers_conditional,
}


def _normal(lost: np.ndarray, gained: np.ndarray, n: int, loss: float) -> np.ndarray:
    estimate = (lost - gained) / n
    error = np.sqrt(np.maximum(lost + gained - (lost - gained) ** 2 / n, 0.0)) / n
    return np.abs(estimate - loss) <= Z * error + 1e-12


def _wilson(p: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    center = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * np.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    return center - half, center + half


# ---- bounds that were considered: which tables pass? -----------------------------------------------------------------


def passes_wald(lost: np.ndarray, gained: np.ndarray) -> np.ndarray:
    error = np.sqrt(np.maximum(lost + gained - (lost - gained) ** 2 / N, 0.0)) / N
    return (lost - gained) / N + Z95 * error < MARGIN


def passes_tango(lost: np.ndarray, gained: np.ndarray) -> np.ndarray:
    return score_statistic(lost, gained, N, MARGIN) < -Z95


# ---- tables ----------------------------------------------------------------------------------------------------------


def rule_table(rule: Rule, rng: np.random.Generator, draws: int) -> list[str]:
    lines = [
        "| true loss | discordance | PASS | FAIL | inconclusive | PASS exact | FAIL exact |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    cases = [(0.0, d) for d in (0.01, 0.02, 0.04, 0.08, 0.16)]
    cases += [(0.01, d) for d in (0.01, 0.02, 0.04, 0.08, 0.16)]
    cases += [(0.05, d) for d in (0.06, 0.08, 0.12, 0.16)]
    for loss, discordance in cases:
        table = draw(rng, N, discordance, loss, draws)
        passed, failed = rule.passes(table[:, 1], table[:, 2]), rule.fails(table[:, 1], table[:, 2])
        figures = (passed.mean(), failed.mean(), 1 - passed.mean() - failed.mean())
        sums = (exact(N, discordance, loss, rule.passes), exact(N, discordance, loss, rule.fails))
        lines.append(_line(f"{100 * loss:g} pp", f"{100 * discordance:g} %", *figures, *sums))
    return lines


def bound_table(rule: Rule) -> list[str]:
    lines = [
        "| discordance | lossless passes: house | Tango | Wald | loss of 1 pp passes: house | Tango | Wald |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for discordance in (0.01, 0.012, 0.02, 0.04, 0.08, 0.16):
        figures = [
            exact(N, discordance, loss, passes)
            for loss in (0.0, MARGIN)
            for passes in (rule.passes, passes_tango, passes_wald)
        ]
        lines.append(_line(f"{100 * discordance:g} %", *figures))
    return lines


def coverage_table(rng: np.random.Generator, draws: int) -> list[str]:
    names = list(INTERVALS)
    lines = [
        f"| true loss | discordance | {' | '.join(names)} | Tango's exact | recovery |",
        "|--:|--:|" + "--:|" * (len(names) + 2),
    ]
    cases = [(0.0, d) for d in (0.01, 0.02, 0.04, 0.08, 0.16)]
    cases += [(0.01, d) for d in (0.02, 0.04, 0.08, 0.16)] + [(0.05, d) for d in (0.06, 0.08, 0.16)]
    for loss, discordance in cases:
        table = draw(rng, N, discordance, loss, draws)
        covered = [INTERVALS[name](table, N, loss).mean() for name in names]
        covered.append(exact(N, discordance, loss, lambda b, c, loss=loss: tango_holds(b, c, N, loss)))  # type: ignore[misc]
        covered.append(recovery_coverage(table, N, (BASELINE - loss) / BASELINE))
        lines.append(_line(f"{100 * loss:g} pp", f"{100 * discordance:g} %", *covered))
    return lines


def recovery_coverage(table: np.ndarray, n: int, recovery: float) -> float:
    tables, counts = np.unique(table[:, :3], axis=0, return_counts=True)
    covered = 0
    for (both, lost, gained), count in zip(tables.tolist(), counts.tolist(), strict=True):
        _, low, high = recovery_interval(both + lost, both + gained, lost, n)
        covered += count * (low <= recovery <= high)
    return covered / len(table)


def family_table(rng: np.random.Generator, draws: int, tasks: int = 7) -> list[str]:
    """A lossless arm on several tasks: how often is one of them significant, and how often does the rule FAIL?"""
    lines = [
        "| tasks | discordance | answers | one significant, uncorrected | with Holm | FAIL at 1 pp, uncorrected | with "
        "Holm |",
        "|--:|--:|---|--:|--:|--:|--:|",
    ]
    for discordance, shared in itertools.product((0.02, 0.08), (False, True)):
        alone, corrected, failed_alone, failed = family_rates(rng, draws, tasks, discordance, shared)
        kind = "one set, shared" if shared else "independent"
        lines.append(_line(str(tasks), f"{100 * discordance:g} %", kind, alone, corrected, failed_alone, failed))
    return lines


def family_rates(
    rng: np.random.Generator, draws: int, tasks: int, discordance: float, shared: bool
) -> tuple[float, float, float, float]:
    """Rates over experiments: significant uncorrected, with Holm; FAIL uncorrected, with Holm. shared: all tasks see
    the same flips, the strongest dependence there is.
    """
    table = draw(rng, N, discordance, 0.0, draws * (1 if shared else tasks))
    p = np.array([mcnemar_exact(int(b), int(c), "greater") for _, b, c, _ in table])
    large = (table[:, 1] - table[:, 2]) / N > MARGIN
    p, large = (np.repeat(x[:, None], tasks, axis=1) if shared else x.reshape(draws, tasks) for x in (p, large))
    adjusted = np.array([holm(row) for row in p])
    return (
        float((p < ALPHA).any(axis=1).mean()),
        float((adjusted < ALPHA).any(axis=1).mean()),
        float(((p < ALPHA) & large).any(axis=1).mean()),
        float(((adjusted < ALPHA) & large).any(axis=1).mean()),
    )


def cluster_table(rng: np.random.Generator, draws: int) -> list[str]:
    """30 problems with 16 seeds an arm: coverage of the interval over problems, and of one that takes all answers for
    independent. The candidate's problems differ from the baseline's by a random shift, as a quantized model's do.
    """
    lines = ["| shift's spread | over problems | answers as independent |", "|--:|--:|--:|"]
    for spread in (0.0, 0.1, 0.2):
        clustered, independent = cluster_coverage(rng, draws, spread)
        lines.append(_line(f"{spread:g}", clustered, independent))
    return lines


def cluster_coverage(rng: np.random.Generator, draws: int, spread: float) -> tuple[float, float]:
    covered = [0, 0]
    for _ in range(draws):
        base = 0.2 + 0.6 * rng.random((30, 1))
        other = base + rng.choice([-spread, spread], (30, 1))
        a, b = rng.random((30, 16)) < base, rng.random((30, 16)) < other
        found = clustered_loss(a, b, resamples=1)
        covered[0] += found.low <= 0.0 <= found.high
        error = math.sqrt(a.var() / a.size + b.var() / b.size)
        covered[1] += abs(found.loss) <= Z * error
    return covered[0] / draws, covered[1] / draws


def few_flips_table() -> list[str]:
    """What the interval and the bound say when almost nothing flipped (n = 1,319)."""
    lines = ["| lost | gained | interval, pp | one-sided bound, pp |", "|--:|--:|--:|--:|"]
    for lost, gained in ((0, 0), (1, 0), (0, 1), (2, 1), (5, 0), (5, 5)):
        low, high = loss_interval(lost, gained, N)
        bound = loss_upper_bound(lost, gained, N)
        lines.append(f"| {lost} | {gained} | {100 * low:.2f} to {100 * high:.2f} | {100 * bound:.2f} |")
    return lines


def _line(*cells: object) -> str:
    return "| " + " | ".join(cell if isinstance(cell, str) else f"{100 * float(cell):.1f}" for cell in cells) + " |"  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    rule = Rule(N, MARGIN)
    for title, lines in (
        ("The rule", rule_table(rule, rng, 25 * arguments.draws)),
        ("The bound beside approximate ones (exact sums)", bound_table(rule)),
        ("Coverage of two-sided 95 % intervals", coverage_table(rng, arguments.draws)),
        ("Holm", family_table(rng, arguments.draws)),
        ("Clusters", cluster_table(rng, arguments.draws)),
        ("Few flips", few_flips_table()),
    ):
        print(f"\n## {title}, percent\n" if title != "Few flips" else f"\n## {title}\n")
        print("\n".join(lines))


if __name__ == "__main__":
    main()
