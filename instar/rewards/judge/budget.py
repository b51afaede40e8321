"""What a run has spent on judges, and whether it may spend more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

from instar.config.judge import BudgetConfig
from instar.errors import ScoreError
from instar.rewards.base import ScoringContext
from instar.store.base import Store

_ledgers: WeakKeyDictionary[Store, dict[str, JudgeBudget]] = WeakKeyDictionary()


class JudgeBudget:
    """Begins with what the store says was paid. Shared by the judges of a run in this process."""

    def __init__(self, calls: int, dollars: float) -> None:
        self.calls = calls
        self.dollars = dollars
        self._pending_calls = 0
        self._pending_dollars = 0.0
        self._settled = asyncio.Event()

    @classmethod
    async def for_run(cls, context: ScoringContext) -> JudgeBudget:
        calls, dollars = await context.store.judgment_totals(context.run_id)
        return _ledgers.setdefault(context.store, {}).setdefault(context.run_id, cls(calls, dollars))

    @asynccontextmanager
    async def reserve(self, budget: BudgetConfig, most: float) -> AsyncGenerator[None]:
        """While a question is under way that may cost ``most``. Where only the questions under way stand
        against another one, it waits for them: they may cost less. Raises ScoreError."""
        while not self._fits(budget, self._pending_calls, self._pending_dollars + most):
            if not self._fits(budget, 0, most):
                raise ScoreError(self._spent(budget))
            await self._settled.wait()
        self._pending_calls += 1
        self._pending_dollars += most
        try:
            yield
        finally:
            self._pending_calls -= 1
            self._pending_dollars -= most
            self._settled.set()
            self._settled = asyncio.Event()

    def record_payment(self, dollars: float) -> None:
        self.calls += 1
        self.dollars += dollars

    def _fits(self, budget: BudgetConfig, pending_calls: int, dollars: float) -> bool:
        calls_fit = budget.calls is None or self.calls + pending_calls < budget.calls
        return calls_fit and (budget.dollars is None or self.dollars + dollars <= budget.dollars)

    def _spent(self, budget: BudgetConfig) -> str:
        if budget.calls is not None and self.calls >= budget.calls:
            return f"the judge's budget of {budget.calls} answers is spent"
        return f"the judge's budget of ${budget.dollars:g} is spent: ${self.dollars:.4f} so far"
