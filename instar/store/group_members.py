"""Decides which sessions belong to a group: the group id, run, channel, slot and agent must match."""

from __future__ import annotations

import logging
from functools import lru_cache

from instar.types import Channel, Group, Session

logger = logging.getLogger(__name__)


def is_member(group: Group, session: Session, agent_id: str) -> bool:
    """Return True if the session belongs to the group, or else log a warning, once per session. The sessions
    of a group in the data channel may be from any agent."""
    if group.accepts(session) and (group.channel is Channel.DATA or session.agent_id == agent_id):
        return True
    _warn_once(session.session_id, group.group_id, session.agent_id, session.channel.value, session.slot)
    return False


@lru_cache(maxsize=4096)
def _warn_once(session_id: str, group_id: str, agent_id: str, channel: str, slot: int) -> None:
    logger.warning(
        "ignoring session %s (agent %s, channel %s, slot %d): it has the group id %s, but its run, agent, "
        "channel or slot does not match that group",
        session_id,
        agent_id,
        channel,
        slot,
        group_id,
    )
