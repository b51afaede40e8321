"""The sets of items on which a candidate is compared with the serving version."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Sequence

from instar.live.base import hash_prompt, is_held_out
from instar.live.sampling import ReplySampler
from instar.live.sanity import MAX_TOKENS, load_sanity_items
from instar.store.base import Store
from instar.types import Call, Policy, Session

SESSIONS_PER_PROMPT = 20
"""At most this many live sessions per held-out prompt are read to find the newest ones. A tenth of the
prompts is held out, and an agent may repeat them."""

ScoreReply = Callable[[Session, Sequence[Call]], Awaitable[float | None]]
"""Returns the combined reward of a session whose last reply was replaced, or None if nothing scores it."""
RateSession = Callable[[str], Awaitable[tuple[float, str | None] | None]]
"""Returns the reward of a session relative to the middle of the range and the id of the rated call, if it is
a single one, or None if the session has no reward."""


class EvaluationSet(ABC):
    @abstractmethod
    async def list_keys(self, evaluated: Collection[str]) -> list[str]:
        """Return the keys of all items, which include the ``evaluated`` ones as far as they still exist."""

    @abstractmethod
    async def score(self, key: str, policy: Policy) -> float | None:
        """Return the score of a version on an item, or None if the item cannot be scored."""


class SanitySet(EvaluationSet):
    def __init__(self, sampler: ReplySampler) -> None:
        self._sampler = sampler
        self._items = {item.key: item for item in load_sanity_items()}

    async def list_keys(self, evaluated: Collection[str]) -> list[str]:
        return list(self._items)

    async def score(self, key: str, policy: Policy) -> float | None:
        item = self._items[key]
        reply = await self._sampler.sample_reply(key, item.messages, item.tools, MAX_TOKENS, policy)
        return float(item.check(reply))


class HeldOutSessions:
    """Finds the newest held-out live sessions of some agents, one for each prompt."""

    def __init__(self, store: Store, run_id: str, agent_ids: Sequence[str], limit: int) -> None:
        self.store = store
        self._run_id = run_id
        self._agent_ids = agent_ids
        self._limit = limit
        self._prompts: dict[str, bytes | None] = {}
        """A hash of the prompt of each known session, or None if it is not held out."""

    async def list_ids(self, evaluated: Collection[str]) -> list[str]:
        """Return the sessions, newest first. Of several with the same prompt, one that is ``evaluated`` is
        returned, else the newest one."""
        ids = await self.store.newest_live_sessions(
            self._run_id, self._agent_ids, self._limit * SESSIONS_PER_PROMPT
        )
        new_ids = [session_id for session_id in ids if session_id not in self._prompts]
        prompts = await self.store.first_prompts(new_ids) if new_ids else {}
        known = {session_id: self._prompts.get(session_id) for session_id in ids}
        for session_id in new_ids:
            messages = prompts.get(session_id, [])
            known[session_id] = hash_prompt(messages) if is_held_out(messages) else None
        self._prompts = known
        chosen: dict[bytes, str] = {}
        for session_id in sorted(ids, key=lambda session_id: session_id not in evaluated):
            if (prompt := known[session_id]) is not None:
                chosen.setdefault(prompt, session_id)
        selected = set(chosen.values())
        return [session_id for session_id in ids if session_id in selected][: self._limit]


class ReplayedPrompts(EvaluationSet):
    """Replays the last call of each held-out session, and scores the session with the new reply."""

    def __init__(self, sessions: HeldOutSessions, sampler: ReplySampler, score_reply: ScoreReply) -> None:
        self._sessions = sessions
        self._sampler = sampler
        self._score_reply = score_reply

    async def list_keys(self, evaluated: Collection[str]) -> list[str]:
        return await self._sessions.list_ids(evaluated)

    async def score(self, key: str, policy: Policy) -> float | None:
        store = self._sessions.store
        session, calls = await store.session(key), await store.calls(key)
        if session is None or not calls:  # deleted meanwhile
            return None
        call = await self._sampler.replay(key, calls[-1], policy)
        return await self._score_reply(session, [*calls[:-1], call])


class FeedbackPairs(EvaluationSet):
    """Compares by how much a version prefers a liked reply over a disliked one. An item is a pair of rated
    held-out sessions, and its score the difference of their replies' mean logprobs."""

    def __init__(self, sessions: HeldOutSessions, sampler: ReplySampler, rate: RateSession) -> None:
        self._sessions = sessions
        self._sampler = sampler
        self._rate = rate

    async def list_keys(self, evaluated: Collection[str]) -> list[str]:
        used = {session_id for key in evaluated for session_id in key.split("+")}
        liked: list[str] = []
        disliked: list[str] = []
        for session_id in reversed(await self._sessions.list_ids(used)):
            rating = None if session_id in used else await self._rate(session_id)
            if rating is not None and rating[0] != 0:
                (liked if rating[0] > 0 else disliked).append(session_id)
        return [*evaluated, *(f"{good}+{bad}" for good, bad in zip(liked, disliked, strict=False))]

    async def score(self, key: str, policy: Policy) -> float | None:
        liked, disliked = [await self._compute_logprob(part, policy) for part in key.split("+")]
        return None if liked is None or disliked is None else liked - disliked

    async def _compute_logprob(self, session_id: str, policy: Policy) -> float | None:
        calls, rating = await self._sessions.store.calls(session_id), await self._rate(session_id)
        if not calls or rating is None:  # deleted meanwhile
            return None
        rated = next((call for call in calls if call.call_id == rating[1]), calls[-1])
        if not len(rated.prompt_ids) or not len(rated.sampled_ids):
            return None
        return await self._sampler.compute_mean_logprob(rated, policy)


class NoItems(EvaluationSet):
    """The held-out set of a run without anything that could compare two replies."""

    async def list_keys(self, evaluated: Collection[str]) -> list[str]:
        return []

    async def score(self, key: str, policy: Policy) -> float | None:
        return None
