"""The promises of docs/statistics.md at n = 1,319 and a margin of 1 pp: by exact sums, and by smaller simulations than
the script's.
"""

from __future__ import annotations

import numpy as np
import pytest
import simulate

from workbench.statistics import judge_loss, loss_upper_bound, mcnemar_exact

DRAWS = 2000


@pytest.fixture(scope="module")
def rule() -> simulate.Rule:
    return simulate.Rule(simulate.N, simulate.MARGIN, most_gained=150)


@pytest.mark.parametrize(("discordance", "passes"), [(0.02, 0.82), (0.04, 0.57), (0.08, 0.36)])
def test_a_lossless_arm_passes_as_often_as_the_data_allow_and_hardly_fails(
    rule: simulate.Rule, discordance: float, passes: float
) -> None:
    assert simulate.exact(simulate.N, discordance, 0.0, rule.passes) == pytest.approx(passes, abs=0.03)
    assert simulate.exact(simulate.N, discordance, 0.0, rule.fails) <= 0.05


@pytest.mark.parametrize("discordance", [0.01, 0.0105, 0.012, 0.015, 0.02, 0.04, 0.08, 0.16])
def test_a_loss_at_the_margin_passes_in_at_most_five_percent(rule: simulate.Rule, discordance: float) -> None:
    assert 0.039 < simulate.exact(simulate.N, discordance, simulate.MARGIN, rule.passes) <= 0.05


@pytest.mark.parametrize("discordance", [0.0501, 0.08, 0.12, 0.16])
def test_a_loss_of_five_points_fails(rule: simulate.Rule, discordance: float) -> None:
    assert simulate.exact(simulate.N, discordance, 0.05, rule.fails) >= 0.99


def test_the_tabulated_rule_is_the_gates(rule: simulate.Rule) -> None:
    table = simulate.draw(np.random.default_rng(1), simulate.N, 0.03, 0.004, 40)
    for _, lost, gained, _ in table.tolist():
        verdict = judge_loss(
            loss_pp=100 * (lost - gained) / simulate.N,
            loss_upper95_pp=100 * loss_upper_bound(lost, gained, simulate.N),
            p_loss=mcnemar_exact(lost, gained, "greater"),
            margin_pp=1.0,
        )
        one = np.array([lost]), np.array([gained])
        assert (verdict == "pass", verdict == "fail") == (rule.passes(*one)[0], rule.fails(*one)[0])


@pytest.mark.parametrize(
    ("loss", "discordance"), [(0.0, 0.01), (0.0, 0.02), (0.0, 0.04), (0.0, 0.16), (0.01, 0.02), (0.05, 0.08)]
)
def test_score_interval_covers_exactly_94_to_96_percent(loss: float, discordance: float) -> None:
    def covered(lost: np.ndarray, gained: np.ndarray) -> np.ndarray:
        return simulate.tango_holds(lost, gained, simulate.N, loss)

    assert 0.94 <= simulate.exact(simulate.N, discordance, loss, covered) <= 0.96


def test_recovery_interval_covers() -> None:
    rng = np.random.default_rng(2)
    for loss, discordance in ((0.0, 0.02), (0.01, 0.08)):
        table = simulate.draw(rng, simulate.N, discordance, loss, DRAWS)
        covered = simulate.recovery_coverage(table, simulate.N, (simulate.BASELINE - loss) / simulate.BASELINE)
        assert 0.95 - 4 * 0.005 <= covered <= 0.95 + 4 * 0.005


@pytest.mark.parametrize("shared", [False, True])
def test_holm_keeps_the_family_rate(shared: bool) -> None:
    alone, corrected, failed_alone, failed = simulate.family_rates(np.random.default_rng(3), 1000, 7, 0.08, shared)
    assert corrected <= 0.05
    assert failed <= corrected
    if not shared:
        assert alone > 0.15
        assert failed_alone > 0.15  # at 8 % discordance a significant loss is above 1 pp anyway


def test_clustered_interval_covers_where_independent_answers_do_not() -> None:
    clustered, independent = simulate.cluster_coverage(np.random.default_rng(4), 400, 0.2)
    assert 0.91 <= clustered <= 0.98
    assert independent < 0.88
