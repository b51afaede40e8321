"""What the headers that clients send anyway tell: the agents' own names for their sessions, and retries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    if not SESSION_HEADERS.keys().isdisjoint(headers):
        for name, kind in SESSION_HEADERS.items():
            if value := headers.get(name):
                return _kept(f"{kind}:{value}")
    return _kept(identity[0]) if identity else None


def _kept(name: str) -> str:
    if len(name) <= MAX_ID:
        return name
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return name[: MAX_ID - len(digest)] + digest


@dataclass(frozen=True, slots=True)
class RetryEvidence:
    """What tells that a client asks again for what it has asked already, rather than for another reply."""

    client_key: str | None = None
    """An idempotency key. Another one is another wish, whatever else speaks for a retry."""
    retried: bool = False
    """The client says that it tries again."""

    def __bool__(self) -> bool:
        return self.retried or self.client_key is not None

    def matches(self, client_key: str | None) -> bool:
        """Whether the same request with this idempotency key is the one that is asked for again."""
        return self.retried if self.client_key is None else self.client_key == client_key


def retry_evidence(headers: Mapping[str, str]) -> RetryEvidence:
    """OpenAI's and Anthropic's clients count their retries: that tells a replay from a second wish."""
    retried = headers.get("x-stainless-retry-count", "0") != "0"
    return RetryEvidence(headers.get("idempotency-key"), retried)
