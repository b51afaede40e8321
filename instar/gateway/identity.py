"""The ids by which agents name their own sessions, in headers they already send."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

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
"""Of longer ids, the beginning and a digest of the whole are kept: they are names, not data."""


def external_id(headers: Mapping[str, str], identity: tuple[str, ...]) -> str | None:
    """What the agent itself calls its session. A header counts before ids in the body."""
    for name, kind in SESSION_HEADERS.items():
        if value := headers.get(name):
            return _kept(f"{kind}:{value}")
    return _kept(identity[0]) if identity else None


def _kept(name: str) -> str:
    if len(name) <= MAX_ID:
        return name
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return name[: MAX_ID - len(digest)] + digest
