"""Claims: the record of what a training step does with each sample, trained or dropped with a reason."""

from __future__ import annotations

from dataclasses import dataclass, replace

from instar.data.advantages import Advantages
from instar.data.group_loader import LoadedGroup, LoadedSession
from instar.data.staleness import Staleness
from instar.types import Claim, ClaimOutcome, Sample, Session


@dataclass(frozen=True, slots=True)
class ClaimBuilder:
    run_id: str
    epoch: int
    staleness: Staleness | None = None
    """The staleness of tokens; None for exported data, to which staleness does not apply."""

    def train(self, session: LoadedSession, sample: Sample, advantage: float | None) -> Claim:
        return Claim(
            run_id=self.run_id,
            epoch=self.epoch,
            sample_key=sample.sample_key,
            session_id=sample.session_id,
            group_id=sample.group_id,
            outcome=ClaimOutcome.TRAINED,
            reward=session.reward,
            advantage=advantage,
            staleness=None if self.staleness is None else self.staleness.of_sample(sample),
        )

    def drop_sample(
        self, session: LoadedSession, sample: Sample, advantage: float | None, reason: str
    ) -> Claim:
        claim = self.train(session, sample, advantage)
        return replace(claim, outcome=ClaimOutcome.DROPPED, reason=reason)

    def drop_loaded(self, session: LoadedSession, reason: str, advantage: float | None) -> list[Claim]:
        """Return claims that drop a session: one per sample, or one for the session if it has no samples."""
        if reason in ("zero_signal", "no_reward") and session.reward is None:
            reason = "failed" if session.is_failed else "no_reward"
        if session.samples:
            return [self.drop_sample(session, sample, advantage, reason) for sample in session.samples]
        key = f"{session.session.group_id}/{session.session.slot}/0"
        claim = self.drop_session(session.session, "no_tokens" if reason == "no_reward" else reason)
        return [replace(claim, sample_key=key, reward=session.reward, advantage=advantage)]

    def drop_session(self, session: Session, reason: str) -> Claim:
        # The key contains the session's own id, because the keys of its slot belong to a different session.
        return self._drop(f"{session.session_id}/0", session.session_id, session.group_id, reason)

    def drop_group(
        self, group: LoadedGroup, reason: str, advantages: Advantages | None = None
    ) -> list[Claim]:
        """Return claims that drop everything in a group, except its untrainable sessions."""
        claims: list[Claim] = []
        for session, advantage in zip(
            group.sessions, advantages or [None] * len(group.sessions), strict=True
        ):
            claims += self.drop_loaded(session, reason, advantage)
        claims += self.drop_superseded(group)
        if claims or group.untrainable:
            return claims
        # A group without sessions needs a claim, too; otherwise every step would load it again.
        group_id = group.group.group_id
        return [self._drop(f"{group_id}/0", "", group_id, "no_sessions")]

    def drop_superseded(self, group: LoadedGroup) -> list[Claim]:
        return [self.drop_session(session, "superseded") for session in group.superseded]

    def _drop(self, sample_key: str, session_id: str, group_id: str | None, reason: str) -> Claim:
        return Claim(
            run_id=self.run_id,
            epoch=self.epoch,
            sample_key=sample_key,
            session_id=session_id,
            group_id=group_id,
            outcome=ClaimOutcome.DROPPED,
            reason=reason,
        )
