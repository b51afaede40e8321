"""Simulates the days of a measurement, and continues an interrupted one."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

from reliability_parts.state_file import StateFile

from live_parts.evaluation import Evaluator
from live_parts.run import LiveRun
from live_parts.schedule import (
    BATCH_HOURS,
    BATCHES_PER_DAY,
    FAULTS,
    NIGHT_HOUR,
    Fault,
    Plan,
    get_time,
)
from live_parts.sessions import Users
from live_parts.users import Phase, make_held_out_questions

REVIEW_QUESTIONS = 16
"""The number of questions with which an owner tries a candidate."""


class Month:
    def __init__(self, run: LiveRun, plan: Plan, state: StateFile, log: Callable[[str], None]) -> None:
        self._run, self._plan, self._state, self._log = run, plan, state, log
        self._evaluator = Evaluator(run.config.model)
        self._held_out = {agent: make_held_out_questions(agent, plan.held_out) for agent in plan.agents}
        self._review = {
            agent: make_held_out_questions(agent, plan.held_out + REVIEW_QUESTIONS)[plan.held_out :]
            for agent in plan.agents
        }
        self._saved_minutes = state.parts.get("minutes", 0.0)
        self._started_at = time.monotonic()

    async def simulate(self) -> None:
        """Simulate the days that are left."""
        day, batch = self._state.parts.get("position", (0, 0))
        if day == self._plan.days:
            return
        self._set_time(day, batch, (*BATCH_HOURS, NIGHT_HOUR)[batch])
        await self._run.start()
        keys = await self._run.create_keys(self._state.parts.get("keys", {}))
        self._state.save("keys", keys)
        users = Users(self._run, keys, self._plan)
        for agent in self._plan.agents:
            users.exclude(agent, [*self._held_out[agent], *self._review[agent]])
        await self._evaluate_serving(day)
        for current in range(day, self._plan.days):
            await self._simulate_day(users, current, batch if current == day else 0)

    async def _simulate_day(self, users: Users, day: int, first_batch: int) -> None:
        for number, slots in enumerate(self._plan.list_batches(day)):
            if number < first_batch:
                continue
            if number == 1 and (fault := FAULTS.get(day)) is not None:
                await self._inject(fault, day)
            self._set_time(day, number, BATCH_HOURS[number])
            await users.use_agents(slots)
            self._state.save("position", (day, number + 1))
        self._set_time(day, BATCHES_PER_DAY, NIGHT_HOUR)
        await self._run.settle()
        if self._plan.get_phase(day) is Phase.GOOD:
            await self._review_candidates(day)
        await self._evaluate_serving(day)
        minutes = self._saved_minutes + (time.monotonic() - self._started_at) / 60
        self._state.save("minutes", minutes)
        self._state.save("position", (day + 1, 0))
        self._log(f"day {day + 1} of {self._plan.days} ({self._plan.get_phase(day)}) after {minutes:.1f} min")

    def _set_time(self, day: int, batch: int, hour: float) -> None:
        self._run.set_time(get_time(day, hour) + get_clock_error(day, batch))

    async def _inject(self, fault: Fault, day: int) -> None:
        self._log(f"day {day + 1}: {fault.describe()}")
        if fault.kill is not None:
            await self._run.kill(fault.kill)
        if fault.restart:
            await self._run.stop()
            await self._run.start()

    async def _review_candidates(self, day: int) -> None:
        """Let each agent's owner try the newest candidate if the gate cannot decide about it, and promote it
        if it is not worse than the serving version."""
        for agent in self._plan.agents:
            if (candidate := await self._run.find_undecided(agent)) is None:
                continue
            serving = await self._run.find_serving_version(agent)
            questions = self._review[agent]
            scores = [
                sum(
                    await self._evaluator.evaluate(
                        agent, await self._run.find_artifact(agent, version), questions
                    )
                )
                for version in (serving, candidate)
            ]
            if scores[1] >= scores[0]:
                await self._run.promote(agent, candidate)
            verb = "promotes" if scores[1] >= scores[0] else "does not promote"
            self._log(
                f"day {day + 1}: the owner of {agent} {verb} version {candidate} "
                f"({scores[1]} against {scores[0]} of {len(questions)} replies liked)"
            )

    async def _evaluate_serving(self, day: int) -> None:
        """Evaluate the serving versions that were not evaluated yet."""
        results: dict[str, Any] = dict(self._state.parts.get("results", {}))
        for agent in self._plan.agents:
            version = await self._run.find_serving_version(agent)
            if (key := f"{agent}@{version}") in results:
                continue
            artifact = await self._run.find_artifact(agent, version)
            satisfied = await self._evaluator.evaluate(agent, artifact, self._held_out[agent])
            satisfaction = fmean(satisfied)
            sanity = await self._evaluator.evaluate_sanity(artifact, self._plan.sanity_items)
            results[key] = {"day": day, "satisfaction": satisfaction, "sanity": sanity}
            self._state.save("results", results)
            self._log(f"day {day + 1}: {key} satisfies {satisfaction:.0%}; {sanity:.0%} of the sanity set")


def get_clock_error(day: int, batch: int) -> float:
    """Return by how many seconds the clock is wrong. Faults happen before the second batch of a day."""
    errors = [
        fault.clock_error
        for fault_day, fault in FAULTS.items()
        if fault.clock_error is not None and (fault_day < day or (fault_day == day and batch >= 1))
    ]
    return errors[-1] if errors else 0.0
