"""Decides from the results of an evaluation whether a candidate may serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from instar.config import GateConfig
from instar.live.sequential import Bounds, compute_bounds
from instar.store.base import EvaluationDecision, EvaluationItem
from instar.types import Json

HELD_OUT = "held_out"
SANITY = "sanity"


class SetResult(NamedTuple):
    """The results on one evaluation set."""

    bounds: Bounds
    items: int
    """The number of items that were evaluated, including those that could not be scored."""
    remaining: int
    """The number of items that can still be evaluated."""

    def to_json(self) -> Json:
        bounds = self.bounds
        return {
            "scored": bounds.items,
            "difference": bounds.mean,
            "lower": bounds.lower,
            "upper": bounds.upper,
            "items": self.items,
            "remaining": self.remaining,
        }


class Decision(NamedTuple):
    decision: EvaluationDecision
    reason: str


def compute_result(items: Sequence[EvaluationItem], set_name: str, alpha: float, remaining: int) -> SetResult:
    """Return the result of the set's items. A difference is limited to ±1, whatever range rewards have."""
    chosen = [item for item in items if item.set_name == set_name]
    differences = [
        max(-1.0, min(1.0, item.candidate_score - item.incumbent_score))
        for item in chosen
        if item.candidate_score is not None and item.incumbent_score is not None
    ]
    return SetResult(compute_bounds(differences, alpha), len(chosen), remaining)


def is_better(held_out: SetResult, config: GateConfig) -> bool:
    """Return True if enough held-out prompts show that the candidate is better."""
    return held_out.bounds.items >= config.min_prompts and held_out.bounds.lower > 0


def is_sane(sanity: SetResult, config: GateConfig) -> bool:
    """Return True if the sanity set shows that the candidate is not worse by more than the margin."""
    return sanity.bounds.lower > config.sanity_margin


def decide(
    held_out: SetResult, sanity: SetResult, config: GateConfig, *, method: str, is_overdue: bool
) -> Decision:
    margin, prompts = config.sanity_margin, held_out.bounds.items
    if sanity.bounds.upper < margin:
        text = f"worse on the sanity set: the difference is at most {sanity.bounds.upper:+.3f}"
        return Decision("reject", text)
    if held_out.bounds.upper < 0:
        text = f"worse on held-out prompts: the difference is at most {held_out.bounds.upper:+.3f}"
        return Decision("reject", text)
    if is_better(held_out, config) and is_sane(sanity, config):
        text = f"better on held-out prompts by at least {held_out.bounds.lower:+.3f}"
        return Decision("promote", f"{text}, and on the sanity set by at least {sanity.bounds.lower:+.3f}")
    if not sanity.remaining and not is_sane(sanity, config):
        text = f"the sanity set does not show that it is worse by less than {-margin:g}"
        return Decision("reject", f"{text} (at least {sanity.bounds.lower:+.3f})")
    has_enough = prompts >= config.min_prompts
    if has_enough and held_out.items >= config.max_items and not is_better(held_out, config):
        return Decision("reject", f"no improvement on {prompts} held-out prompts (live.gate.max_items)")
    if has_enough and is_overdue:
        text = f"no decision within {config.deadline_days:g} days (live.gate.deadline_days)"
        return Decision("reject", text)
    return Decision("more data", _explain_wait(held_out, sanity, config, method))


def _explain_wait(held_out: SetResult, sanity: SetResult, config: GateConfig, method: str) -> str:
    if held_out.remaining or not is_sane(sanity, config):
        return "in progress"
    if method == "none":
        return "no rule, judge or engine can compare replies to held-out prompts, so a person must decide"
    if (count := held_out.bounds.items) < config.min_prompts:
        return (
            f"{count} of {config.min_prompts} held-out prompts could be compared (live.gate.min_prompts); "
            "until there are more, only a person can promote it"
        )
    return f"{count} held-out prompts do not suffice; it waits for more"
