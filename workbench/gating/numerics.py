"""Checks on the evidence, of what the servers ran: an arm's answers are about its numerics only where it ran them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from workbench.gating.policy import Policy
from workbench.records import GateCheck, NumericsCard


def check_numerics(rules: Policy, cards: Mapping[str, NumericsCard], promised: Collection[str] = ()) -> list[GateCheck]:
    """One check for each arm that has a numerics card. A gated arm whose server ran something else than the arm says
    makes the run invalid, by the tier of "numerics"; of other arms, vLLM's own baselines among them, it is reported. A
    card that could not be taken leaves a gated arm's check open, as does one that the run took (promised) and that is
    gone, or that is of no layer.
    """
    checks = []
    for arm, card in cards.items():
        status = "pass" if card.as_asked else "inconclusive" if card.error else "invalid"
        reason = card.verdict.strip() or _without_verdict(card)
        if len(card.findings) > 1:
            reason += f". All: {' | '.join(card.findings)}"
        checks.append(
            GateCheck(
                name="numerics",
                arm=arm,
                status=rules.weigh(status, "numerics") if arm in rules.gated else "reported",
                reason=reason if reason.endswith(".") else f"{reason}.",
                value=float(sum(row.count for row in card.rows if row.finding)),
                limit=0.0,
                unit="layers",
                tier=rules.tier("numerics"),
            )
        )
    for arm in rules.gated:
        if arm not in cards and arm in promised:
            reason = "engine.numerics asks for a card of what its server ran, and there is none: evaluate it again."
            checks.append(_open(rules, arm, reason))
        elif arm in cards and cards[arm].as_asked and not cards[arm].probed:
            checks.append(_open(rules, arm, "its card is of no layer: what the server ran is not known."))
    return checks


def _open(rules: Policy, arm: str, reason: str) -> GateCheck:
    status, tier = rules.weigh("inconclusive", "numerics"), rules.tier("numerics")
    return GateCheck(name="numerics", arm=arm, status=status, reason=reason, tier=tier)


def _without_verdict(card: NumericsCard) -> str:
    """What a card says whose one line was left empty."""
    if error := card.error.strip():
        return f"no numerics were recorded: {error}"
    return next((line for line in card.findings if line.strip()), "its card gives no verdict in words")
