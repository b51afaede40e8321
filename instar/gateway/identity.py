"""The ids by which agents name their own sessions, in headers they already send."""

from __future__ import annotations

from collections.abc import Mapping

SESSION_HEADERS = (
    "x-claude-code-session-id",  # Claude Code
    "session_id",  # Codex
    "session-id",  # Codex, by its newer name
    "x-session-affinity",  # OpenCode
    "x-opencode-session",  # OpenCode, to its own provider
    "x-openclaw-session-key",  # OpenClaw
    "x-session-id",
    "x-conversation-id",
    "conversation_id",  # Codex, before it sent session_id
    "x-litellm-session-id",
    "helicone-session-id",
)
"""Names in lower case, the most telling first."""
MAX_ID = 512
"""Longer ids are cut: they are names, not data."""


def external_id(headers: Mapping[str, str], identity: tuple[str, ...]) -> str | None:
    """What the agent itself calls its session. A header counts before ids in the body."""
    for name in SESSION_HEADERS:
        if value := headers.get(name):
            return f"{name}:{value}"[:MAX_ID]
    return identity[0][:MAX_ID] if identity else None
