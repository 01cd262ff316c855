"""Which of three made an arm lose: its weights, the harness, or the path that serves it; or that it cannot be told.

    attributions = attribute(rules, Evidence(comparison=comparison, lint=reports, rows=rows, evaluations=evaluations))

One for each gated and reported arm, from what the layers of checks saw (`workbench.gating.layers`). The rules, in
order; docs/gating.md says why:

1. A fault in the checkpoint's bytes or weights is "quantization". Cut, empty and unreadable answers follow from such
   weights; only what no weights can bring about (null and failed answers, a limit below the tokens asked for, other
   prompts) is another cause beside it.
2. A server that runs other numerics than the arm says, or is sent the same messages and counts other prompts, is
   "serving path". Every answer may suffer from it, so what is left of the loss is not split further.
3. A fate that took a good part of the lost answers is its side's cause. Where weights are not known to be sound, a
   fate that broken weights bring about as well (cut, unfinished, empty) decides nothing.
4. What is left is judged on the clean pairs: both answers whole, not empty, read alike by every filter. A loss that is
   still significant there is "quantization" if weights, endpoint and client were all looked at and found sound and the
   weights differ from the baseline's; if the weights are the baseline's, it is the "serving path".
5. Several causes are "mixed". None, with a loss, is "undecided", with what would tell.

An attribution explains a verdict; it never changes one.
"""

from __future__ import annotations

from workbench.gating.layers import HARD, HARNESS, QUANTIZATION, SERVING, Evidence, has_lost, look_at_arm
from workbench.gating.policy import Policy
from workbench.records import Attribution, LayerFinding
from workbench.statistics import ALPHA, mcnemar_exact

_WEIGHT_LAYERS = ("lint", "bytes", "tensors")
_ORDER = (QUANTIZATION, HARNESS, SERVING)
_TELL_WEIGHTS = "the arm's checkpoint linted and its weights measured against the source's (stages lint and analyze)"
_TELL_SERVER = (
    "a numerics card of the arm's server, or the same checkpoint served as backend reference and compared with this arm"
)
_TELL_HARNESS = (
    "both arms evaluated by `workbench evaluate`, which keeps finish reasons, the arm with the baseline's folder given"
)
_TELL_ITEMS = "more items: the clean pairs are too few to show a loss, or to exclude one"


def attribute(rules: Policy, evidence: Evidence) -> tuple[Attribution, ...]:
    """An attribution for each gated and reported arm that left something to look at."""
    found = []
    for arm in (*rules.gated, *rules.reported):
        layers = look_at_arm(rules, arm, evidence)
        if any(layer.status != "not run" for layer in layers if layer.layer != "noise"):
            found.append(_attribute_arm(rules, arm, evidence, layers))
    return tuple(found)


def _attribute_arm(rules: Policy, arm: str, evidence: Evidence, layers: list[LayerFinding]) -> Attribution:
    caught = [layer for layer in layers if layer.status == "caught"]
    lost = any(has_lost(rules, row) for row in evidence.tasks(arm))
    weights_faulty = any(layer.layer in _WEIGHT_LAYERS for layer in caught)
    weights_sound = not weights_faulty and _weights_known(arm, evidence, layers)
    decided, open_questions = _causes_found(caught, weights_faulty=weights_faulty, weights_sound=weights_sound)
    causes = set(decided)
    if lost and not weights_faulty and not _spoils_all(caught):
        cause, more_questions = _cause_of_the_rest(arm, evidence, layers, causes, weights_sound=weights_sound)
        causes |= {cause} if cause else set()
        open_questions += more_questions
    ordered = tuple(cause for cause in _ORDER if cause in causes)
    cause = "mixed" if len(ordered) > 1 else (ordered[0] if ordered else ("undecided" if lost else "none"))
    if cause == "none" and open_questions:
        cause = "undecided"
    return Attribution(
        arm=arm,
        cause=cause,
        summary=_summary(rules, arm, cause, ordered, caught, lost, weights_faulty=weights_faulty),
        causes=ordered,
        caught_by=tuple(dict.fromkeys(layer.layer for layer in caught)),
        layers=tuple(layers),
        would_tell=tuple(dict.fromkeys(open_questions)),
    )


def _weights_known(arm: str, evidence: Evidence, layers: list[LayerFinding]) -> bool:
    """Whether something showed the arm's weights to be sound: measured within the format, or the baseline's own."""
    measured = any(layer.layer == "tensors" and layer.status == "clean" for layer in layers)
    return measured or _same_weights(arm, evidence)


def _same_weights(arm: str, evidence: Evidence) -> bool:
    """Whether an arm serves the baseline's checkpoint in the baseline's way: then no weights differ."""
    ours, theirs = evidence.servers.get(arm), evidence.servers.get(evidence.baseline)
    if ours is None or theirs is None or not ours.fingerprint:
        return False
    keys = ("fingerprint", "backend", "weight_format", "activation_format", "kv_cache_dtype", "dtype")
    return all(getattr(ours, key) == getattr(theirs, key) for key in keys)


def _spoils_all(caught: list[LayerFinding]) -> bool:
    """Whether the endpoint did something that every answer may suffer from: then a rest cannot be told apart."""
    return any(layer.layer in ("numerics", "noise") or layer.kind == "prompts" for layer in caught)


def _is_hard(layer: LayerFinding) -> bool:
    """Whether no weights, however broken, could bring this about."""
    return layer.layer in ("numerics", "noise", "preflight") or layer.kind in HARD


def _causes_found(
    caught: list[LayerFinding], *, weights_faulty: bool, weights_sound: bool
) -> tuple[set[str], list[str]]:
    """Causes that findings speak for by themselves, and what would tell about those that do not decide."""
    causes: set[str] = set()
    questions: list[str] = []
    for layer in caught:
        if layer.layer in _WEIGHT_LAYERS:
            causes.add(QUANTIZATION)
        elif weights_faulty and not _is_hard(layer):
            continue  # what such weights write is cut, empty or unreadable
        elif layer.kind in ("cut", "unfinished", "empty") and not weights_sound:
            questions.append(_TELL_WEIGHTS)
        elif layer.kind == "empty":
            causes.add(SERVING)  # empty answers from sound weights: rounding does not silence a model
        elif layer.cause:
            causes.add(layer.cause)
    return causes, questions


def _cause_of_the_rest(
    arm: str, evidence: Evidence, layers: list[LayerFinding], causes: set[str], *, weights_sound: bool
) -> tuple[str, list[str]]:
    """What the loss among clean pairs speaks for, and what would tell where that stays open."""
    lost = evidence.lost(arm)
    status = {layer.layer: layer.status for layer in layers}
    served = status["numerics"] == "clean" or bool(arm in evidence.servers and evidence.servers[arm].layers)
    questions = []
    if not weights_sound:
        questions.append(_TELL_WEIGHTS)
    if not served and not _same_weights(arm, evidence):
        questions.append(_TELL_SERVER)
    if not lost:
        return "", [*questions, _TELL_HARNESS]
    remains = mcnemar_exact(sum(of.clean_lost for of in lost), sum(of.clean_gained for of in lost), "greater") < ALPHA
    if not remains:
        return "", [] if causes else [*questions, _TELL_ITEMS]
    if questions:
        return "", questions
    return (SERVING if _same_weights(arm, evidence) else QUANTIZATION), []


def _summary(
    rules: Policy,
    arm: str,
    cause: str,
    causes: tuple[str, ...],
    caught: list[LayerFinding],
    lost: bool,
    *,
    weights_faulty: bool,
) -> str:
    loss = "the loss" if lost else "no loss is established, but a fault was seen"
    if cause == "none" and not rules.margin_pp:
        return f"{arm}: the policy judges no answers, and no layer of checks saw a fault."
    if cause == "none":
        return f"{arm}: no loss above the margin is established, and no layer of checks saw a fault."
    if cause == "undecided":
        what = "a loss whose cause" if lost else "faults whose cause"
        return f"{arm}: {what} cannot be told from what was looked at."
    if cause == "mixed":
        return f"{arm}: {loss}: {' and '.join(causes)} each have a part in it."
    first = next((layer.reason for layer in caught if layer.cause == cause), "")
    if cause == QUANTIZATION and not weights_faulty:
        return (
            f"{arm}: {loss} is one of rounding: weights as good as their format allows, served and asked as they "
            "should be, and whole answers that are wrong."
        )
    where = {
        QUANTIZATION: "a fault in the quantized weights",
        HARNESS: "the harness, not the weights",
        SERVING: "the serving path, not the weights",
    }[cause]
    return f"{arm}: {loss}: {where}" + (f" ({first})." if first else ".")
