"""The server that agents talk to."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from instar.config.base import Positive, Seconds, Section


class RedactConfig(Section):
    """What is cut out of messages before they are stored. A call that held such a span is not trained on."""

    secrets: bool = True
    """Cut out what looks like an API key, a token or a private key."""
    patterns: list[str] = []
    """Further regular expressions; what they match is cut out."""


class GatewayConfig(Section):
    """The server that agents talk to."""

    host: str = "127.0.0.1"
    """The address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 picks a free port."""
    request_timeout: Seconds = 600.0
    """Deadline of one model call."""
    max_body: Positive = 16 * 1024 * 1024
    """Largest request body, in bytes."""
    max_sessions_in_memory: Positive = 1024
    """Message graphs kept at hand; older ones are read back from the store when needed."""
    max_in_flight: Positive = 1024
    """Model calls at once; one more is answered with 429."""
    max_messages: Positive = 20_000
    """Most messages of one request."""
    max_tools: Positive = 2048
    """Most tools of one request."""
    max_header: Positive = 64 * 1024
    """Largest request line and headers, in bytes."""
    read_timeout: Seconds = 60.0
    """Deadline for a request's headers and body to arrive, and for a client to take the end of a stream."""
    idle_timeout: Seconds = 1800.0
    """A live session without a call for so long is closed."""
    redact: RedactConfig = RedactConfig()


class ModelRoute(Section):
    """What answers when an agent asks for a model by some name."""

    upstream: str | None = None
    """One of `upstreams`. Default: the run's engine."""
    trainable: bool = True
    """False: recorded, never trained on."""
