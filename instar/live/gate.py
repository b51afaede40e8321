"""Evaluates the candidates of one lineage, and moves them between the stages.

The states of a version and the transitions that the gate makes, each in one transaction of the store::

    candidate → shadow     its evaluation decides `promote`
    candidate → rejected   its evaluation decides `reject`
    shadow → canary        the check of the stage advances it
    canary → serving       the check of the stage advances it
    shadow, canary → rejected   the check rejects it

Everything that the gate knows is in the store, so a gate that is killed at any point continues where it was:
items that have scores are not evaluated again, and a decision follows from the stored items.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from instar.async_utils import map_concurrently
from instar.config import GateConfig
from instar.errors import EngineError, EngineUnavailable, PolicyNotFound, RenderError
from instar.live.base import StageCheck, skip_stage
from instar.live.decision import HELD_OUT, SANITY, SetResult, compute_result, decide, is_better, is_sane
from instar.live.sampling import ReplySampler
from instar.live.sequential import get_candidate_alpha
from instar.live.sets import EvaluationSet
from instar.store.base import Evaluation, EvaluationItem, PolicyVersion, Store
from instar.types import Policy, PolicyStage

logger = logging.getLogger(__name__)

SECONDS_PER_DAY = 86_400.0
NEXT_STAGE = {PolicyStage.SHADOW: PolicyStage.CANARY, PolicyStage.CANARY: PolicyStage.SERVING}
DECIDED_STAGES = {"promote": PolicyStage.SHADOW, "reject": PolicyStage.REJECTED}


@dataclass(frozen=True, slots=True)
class _Pair:
    candidate: Policy
    incumbent: Policy


class Gate:
    """The gate of the policy ``policy_id``. ``sets`` are its evaluation sets, by name."""

    def __init__(
        self,
        policy_id: str,
        config: GateConfig,
        store: Store,
        sampler: ReplySampler,
        sets: Mapping[str, EvaluationSet],
        *,
        method: str,
        check_stage: StageCheck = skip_stage,
    ) -> None:
        self._policy_id = policy_id
        self._config = config
        self._store = store
        self._sampler = sampler
        self._sets = sets
        self._method = method
        self._check_stage = check_stage
        self.activity = "starting"

    async def advance(self, *, may_evaluate: bool = True) -> bool:
        """Do the next small piece of work. Return False if there is nothing to do now. If ``may_evaluate`` is
        False, only shadow and canary versions are decided, for which nothing is sampled. Raises EngineError
        if the engine fails, and StoreError if the store does."""
        rows = {row.policy.version: row for row in await self._store.policy_versions(self._policy_id)}
        promotable = await self._store.promotable_versions(self._policy_id)
        pending = [rows[version] for version in promotable if version in rows]
        evaluations = await self._store.evaluations(self._policy_id)
        incumbent = await self._store.latest_policy(self._policy_id)
        current = [evaluation for evaluation in evaluations if evaluation.incumbent == incumbent.version]
        if staged := [row for row in pending if row.stage is not PolicyStage.CANDIDATE]:
            return await self._follow_stage(staged[-1], current, incumbent.version)
        if not may_evaluate:
            return False
        # A candidate older than an evaluated one is left to a person.
        last_evaluated = max((evaluation.version for evaluation in evaluations), default=0)
        versions = {r.policy.version: r.policy for r in pending if r.policy.version >= last_evaluated}
        if not versions:
            self.activity = "no candidate"
            return False
        newest = max(versions)
        undecided = [e for e in current if e.version in versions and e.decision == "more data"]
        decided = next((e for e in current if e.version == newest and e.decision in DECIDED_STAGES), None)
        if undecided:
            evaluation = undecided[-1]
        elif decided is not None:
            return await self._apply(decided)
        else:
            evaluation = await self._begin(newest, incumbent.version)
        pair = _Pair(versions[evaluation.version], incumbent)
        if await self._evaluate(evaluation, pair):
            return True
        if evaluation.version == newest:
            return False
        reason = f"version {newest} is newer, and this one could not be decided yet"
        await self._store.record_evaluation(
            replace(await self._reload(evaluation), decision="superseded", reason=reason)
        )
        return True

    # --- stages ------------------------------------------------------------------------------------

    async def _follow_stage(self, row: PolicyVersion, current: Sequence[Evaluation], incumbent: int) -> bool:
        """Ask the check of the stage what becomes of the version. ``current`` are the evaluations against the
        incumbent."""
        version, stage = row.policy.version, row.stage
        self.activity = f"version {version} is in the stage {stage}"
        if self._config.mode != "auto":
            return False
        if not any(e.version == version and e.decision == "promote" for e in current):
            # The serving version changed, or somebody moved the version here by hand.
            reason = "it was not compared with the version that is served now"
            return await self._move(version, stage, PolicyStage.REJECTED, reason, incumbent)
        outcome = await self._check_stage(self._policy_id, version, stage)
        if outcome.action == "wait":
            self.activity = f"version {version} ({stage}): {outcome.reason}"
            return False
        next_stage = NEXT_STAGE[stage] if outcome.action == "advance" else PolicyStage.REJECTED
        reason = outcome.reason or f"passed the stage {stage}"
        return await self._move(version, stage, next_stage, reason, incumbent)

    async def _move(
        self, version: int, stage: PolicyStage, next_stage: PolicyStage, reason: str, incumbent: int
    ) -> bool:
        move = (self._policy_id, version, stage, next_stage, reason)
        if await self._store.move_version(*move, incumbent=incumbent):
            logger.info("%s version %s: %s → %s (%s)", self._policy_id, version, stage, next_stage, reason)
        return True

    async def _apply(self, evaluation: Evaluation) -> bool:
        """Move a version whose evaluation was decided while the mode was `manual`."""
        if self._config.mode != "auto":
            self.activity = f"version {evaluation.version} waits for a person ({evaluation.decision})"
            return False
        await self._store.record_evaluation(evaluation, DECIDED_STAGES[evaluation.decision])
        return True

    # --- evaluation --------------------------------------------------------------------------------

    async def _begin(self, version: int, incumbent: int) -> Evaluation:
        alpha = self._config.alpha
        return await self._store.begin_evaluation(
            self._policy_id,
            version,
            incumbent,
            self._method,
            lambda number: get_candidate_alpha(alpha, number),
        )

    async def _evaluate(self, evaluation: Evaluation, pair: _Pair) -> bool:
        """Decide if the stored scores suffice, else score a few more items. Return False if none are left."""
        key = (evaluation.policy_id, evaluation.version, evaluation.incumbent)
        items = await self._store.evaluation_items(*key)
        remaining = {name: await self._list_remaining(name, items, key) for name in self._sets}
        results = {
            name: compute_result(items, name, evaluation.alpha, len(keys)) for name, keys in remaining.items()
        }
        held_out, sanity = results[HELD_OUT], results[SANITY]
        is_overdue = time.time() - evaluation.started_at > self._config.deadline_days * SECONDS_PER_DAY
        decision, reason = decide(
            held_out, sanity, self._config, method=evaluation.method, is_overdue=is_overdue
        )
        self._describe(evaluation.version, results)
        results_json = {name: result.to_json() for name, result in results.items()}
        evaluation = replace(evaluation, decision=decision, reason=reason, results=results_json)
        stage = DECIDED_STAGES.get(decision) if self._config.mode == "auto" else None
        await self._store.record_evaluation(evaluation, stage)
        if decision != "more data":
            logger.info("%s version %s: %s (%s)", key[0], evaluation.version, decision, reason)
            return True
        needed = {
            HELD_OUT: not is_better(held_out, self._config),
            SANITY: not is_sane(sanity, self._config),
        }
        count = self._config.concurrency
        chunk = [(name, item) for name, keys in remaining.items() if needed[name] for item in keys[:count]]
        if not chunk:
            self.activity = f"version {evaluation.version}: {reason}"
            return False
        return await self._score(evaluation, pair, chunk)

    async def _list_remaining(
        self, name: str, items: Sequence[EvaluationItem], key: tuple[str, int, int]
    ) -> list[str]:
        """Return the items that were not evaluated yet, in an order that is random for each version."""
        evaluated = {item.item_key for item in items if item.set_name == name}
        keys = [item for item in await self._sets[name].list_keys(evaluated) if item not in evaluated]
        if name == HELD_OUT:
            keys = keys[: max(0, self._config.max_items - len(evaluated))]
        return sorted(keys, key=lambda item: hashlib.sha256(repr((key, item)).encode()).digest())

    def _describe(self, version: int, results: Mapping[str, SetResult]) -> None:
        done = sum(result.items for result in results.values())
        total = done + sum(result.remaining for result in results.values())
        self.activity = f"evaluating version {version}: {done} of {total} items"

    async def _score(self, evaluation: Evaluation, pair: _Pair, chunk: Sequence[tuple[str, str]]) -> bool:
        """Score the items with both versions. Return False if the engine cannot load the versions now."""
        try:
            for policy in (pair.incumbent, pair.candidate):
                await self._sampler.load(policy)
        except EngineUnavailable:
            raise
        except EngineError as error:  # the files may be gone, or all adapters that fit are in use
            self.activity = f"version {evaluation.version} cannot be evaluated now: {error}"
            return False

        async def score(name_and_key: tuple[str, str]) -> None:
            name, key = name_and_key
            candidate_score = await self._try_score(name, key, pair.candidate)
            incumbent_score = await self._try_score(name, key, pair.incumbent)
            ids = (evaluation.policy_id, evaluation.version, evaluation.incumbent)
            await self._store.add_evaluation_item(
                EvaluationItem(*ids, name, key, candidate_score, incumbent_score)
            )

        await map_concurrently(score, chunk, self._config.concurrency)
        return True

    async def _try_score(self, name: str, key: str, policy: Policy) -> float | None:
        """Return None if this item cannot be evaluated. Raises EngineError if the engine cannot serve now."""
        try:
            return await self._sets[name].score(key, policy)
        except (EngineUnavailable, PolicyNotFound):
            raise
        except (EngineError, RenderError) as error:
            logger.info("item %s cannot be evaluated: %s", key, error)
            return None

    async def _reload(self, evaluation: Evaluation) -> Evaluation:
        for stored in await self._store.evaluations(self._policy_id):
            if stored.number == evaluation.number:
                return stored
        return evaluation
