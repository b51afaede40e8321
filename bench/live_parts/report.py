"""The figures of a measurement, from its state and the store of its run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from instar.store.base import Store
from instar.types import ClaimOutcome
from live_parts.run import NAME, LiveRun
from live_parts.schedule import Plan, is_inverted, parse_slot

POISONED_SHARE = 0.5
"""The share of sessions with inverted feedback from which on a version counts as made from poisoned data."""


@dataclass(frozen=True)
class AgentResult:
    satisfaction_before: float
    satisfaction_after: float
    worst_drop: float
    poison_share: float
    sanity_drop: float
    candidates: int
    served: list[int]
    """The versions that served the agent, in order."""
    poisoned: list[int]


def summarize(agents: Mapping[str, AgentResult]) -> dict[str, Any]:
    rows = agents.values()
    return {
        "satisfaction_before": round(max(row.satisfaction_before for row in rows), 3),
        "satisfaction_after": round(min(row.satisfaction_after for row in rows), 3),
        "worst_drop": round(max(row.worst_drop for row in rows), 3),
        "poison_share": round(max(row.poison_share for row in rows), 3),
        "sanity_drop": round(max(row.sanity_drop for row in rows), 3),
        "agents": {agent: asdict(row) for agent, row in agents.items()},
    }


async def summarize_agent(
    run: LiveRun, plan: Plan, agent: str, results: Mapping[str, Mapping[str, Any]]
) -> AgentResult:
    own = {int(key.partition("@")[2]): row for key, row in results.items() if key.startswith(f"{agent}@")}
    served = sorted(own)
    scores, sanity = ([own[version][name] for version in served] for name in ("satisfaction", "sanity"))
    policy_id = run.config.get_policy_id(agent)
    rows = await run.store.policy_versions(policy_id)
    poisoned = await find_poisoned_versions(run.store, plan, policy_id)
    return AgentResult(
        satisfaction_before=scores[0],
        satisfaction_after=scores[-1],
        worst_drop=compute_worst_drop(scores),
        poison_share=await compute_poison_share(run.store, agent, poisoned),
        sanity_drop=max(sanity[0] - score for score in sanity),
        candidates=len({row.step for row in rows if row.step}),
        served=served,
        poisoned=sorted(poisoned),
    )


def compute_worst_drop(scores: Sequence[float]) -> float:
    """Return how far a score is at most below the best one before it."""
    return max(max(scores[: index + 1]) - score for index, score in enumerate(scores))


async def find_poisoned_versions(store: Store, plan: Plan, policy_id: str) -> set[int]:
    """Return the versions whose step was trained mainly on sessions with inverted feedback, and those that
    were trained from such a version."""
    tasks = {row.session.session_id: row.session.task_id for row in await store.sessions(NAME)}
    poisoned: set[int] = set()
    for row in await store.policy_versions(policy_id):
        claims = await store.claims(NAME, policy_id=policy_id, step=row.step)
        slots = [
            slot
            for claim in claims
            if claim.outcome is ClaimOutcome.TRAINED and (slot := tasks.get(claim.session_id)) is not None
        ]
        inverted = sum(is_inverted(slot, plan) for slot in slots)
        if row.parent in poisoned or (slots and inverted >= POISONED_SHARE * len(slots)):
            poisoned.add(row.policy.version)
    return poisoned


async def compute_poison_share(store: Store, agent: str, poisoned: set[int]) -> float:
    """Return the largest share of an agent's sessions in a day that a poisoned version answered."""
    sessions = [
        row.session
        for row in await store.sessions(NAME)
        if row.session.agent_id == agent and row.session.task_id
    ]
    calls = await store.calls_by_session([session.session_id for session in sessions])
    totals, answered = Counter[int](), Counter[int]()
    for session in sessions:
        day = parse_slot(session.task_id or "")[1]
        totals[day] += 1
        versions = {int(version) for call in calls[session.session_id] for version in call.versions}
        answered[day] += not poisoned.isdisjoint(versions)
    return max((answered[day] / count for day, count in totals.items()), default=0.0)
