"""Scores the calls of live sessions that are still open, when what follows a call shows how good it was.

The rewards are stored at once. The session is scored again when it is completed; a reward with the same id is
then not stored again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress

from instar.config import ScoringConfig
from instar.errors import SessionNotFound, StoreError
from instar.rewards.base import JUDGE_AGENT, Scorer, Transcript, describe_error, get_task
from instar.store.base import SessionFilter, SessionRow, Store
from instar.types import Channel, SessionStatus

logger = logging.getLogger(__name__)

POLL_INTERVAL_SECONDS = 2.0
OPEN_SESSIONS = SessionFilter(channel=Channel.LIVE, status=SessionStatus.OPEN)


class OpenSessionQueue:
    def __init__(self, store: Store, run_id: str, scorers: Sequence[Scorer], config: ScoringConfig) -> None:
        self._store = store
        self._run_id = run_id
        self._scorers = scorers
        self._config = config
        self._call_counts: dict[str, int] = {}
        """The number of calls that each open session had when it was last scored."""

    async def run(self, is_draining: Callable[[], bool]) -> None:
        while self._scorers and not is_draining():
            await self.score_changed()
            await asyncio.sleep(POLL_INTERVAL_SECONDS)

    async def score_changed(self) -> None:
        """Score the open sessions that have new calls."""
        rows = await self._store.sessions(self._run_id, where=OPEN_SESSIONS)
        known, self._call_counts = self._call_counts, {}
        for row in rows:
            session = row.session
            self._call_counts[session.session_id] = row.call_count
            has_followup = row.call_count > max(1, known.get(session.session_id, 0))
            if has_followup and session.agent_id != JUDGE_AGENT:
                await self._score(row)

    async def _score(self, row: SessionRow) -> None:
        session_id = row.session.session_id
        transcript = Transcript(session_id, await self._store.calls(session_id), None)
        for scorer in self._scorers:
            try:
                async with scorer.concurrency_limit or nullcontext():
                    async with asyncio.timeout(self._config.deadline):
                        rewards = await scorer.score_open(get_task(row.session, None), transcript)
            except StoreError:
                raise
            except Exception as error:  # noqa: BLE001 - a scorer is user code and may raise anything
                reason = describe_error(error)
                logger.info("scorer %s failed on the open session %s: %s", scorer.key, session_id, reason)
                continue  # the calls are scored with the next one, or at the end of the session
            with suppress(SessionNotFound):
                await self._store.add_rewards(rewards)
