"""Tracks what a run has spent on judges, and enforces the budget."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

from instar.config.judge import BudgetConfig
from instar.errors import ScoreError
from instar.rewards.base import ScoringContext
from instar.store.base import Store

_budgets: WeakKeyDictionary[Store, dict[str, JudgeBudget]] = WeakKeyDictionary()


class JudgeBudget:
    """A run's spending on judges, shared by all judges in this process and initialized from the store."""

    def __init__(self, calls: int, dollars: float) -> None:
        self.calls = calls
        self.dollars = dollars
        self._pending_calls = 0
        self._pending_dollars = 0.0
        self._released = asyncio.Event()

    @classmethod
    async def for_run(cls, context: ScoringContext) -> JudgeBudget:
        calls, dollars = await context.store.judgment_totals(context.run_id)
        return _budgets.setdefault(context.store, {}).setdefault(context.run_id, cls(calls, dollars))

    @asynccontextmanager
    async def reserve(self, budget: BudgetConfig, max_cost: float) -> AsyncGenerator[None]:
        """Reserve ``max_cost`` dollars for one call. Raises ScoreError if the budget is spent."""
        while not self._fits(budget, self._pending_calls, self._pending_dollars + max_cost):
            if not self._fits(budget, 0, max_cost):
                raise ScoreError(self._describe_spending(budget))
            # Only calls in progress block this one, and they may cost less than reserved.
            await self._released.wait()
        self._pending_calls += 1
        self._pending_dollars += max_cost
        try:
            yield
        finally:
            self._pending_calls -= 1
            self._pending_dollars -= max_cost
            self._released.set()
            self._released = asyncio.Event()

    def record_payment(self, dollars: float) -> None:
        self.calls += 1
        self.dollars += dollars

    def _fits(self, budget: BudgetConfig, pending_calls: int, dollars: float) -> bool:
        calls_fit = budget.calls is None or self.calls + pending_calls < budget.calls
        return calls_fit and (budget.dollars is None or self.dollars + dollars <= budget.dollars)

    def _describe_spending(self, budget: BudgetConfig) -> str:
        if budget.calls is not None and self.calls >= budget.calls:
            return f"the judge's budget of {budget.calls} answers is spent"
        return f"the judge's budget of ${budget.dollars:g} is spent: ${self.dollars:.4f} so far"
