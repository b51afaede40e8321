"""The ids by which agents name their own sessions, in headers they already send."""

from __future__ import annotations

from collections.abc import Mapping

SESSION_HEADERS = {
    "x-claude-code-session-id": "claude-session",  # also in the body, under this name
    "session-id": "session",  # Codex
    "session_id": "session",  # Codex before, OpenClaw
    "x-session-affinity": "session",  # OpenCode, OpenClaw
    "x-opencode-session": "session",
    "x-session-id": "session",
    "x-conversation-id": "conversation",
    "conversation_id": "conversation",
    "x-litellm-session-id": "session",
    "helicone-session-id": "session",
}
"""Header, in lower case, → the kind of id it holds. The most telling first."""
MAX_ID = 512
"""Longer ids are cut: they are names, not data."""


def external_id(headers: Mapping[str, str], identity: tuple[str, ...]) -> str | None:
    """What the agent itself calls its session. A header counts before ids in the body."""
    for name, kind in SESSION_HEADERS.items():
        if value := headers.get(name):
            return f"{kind}:{value}"[:MAX_ID]
    return identity[0][:MAX_ID] if identity else None
