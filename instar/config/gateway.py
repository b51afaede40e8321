"""The gateway and the models that it serves."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from instar.config.base import Positive, Seconds, Section


class RedactConfig(Section):
    """Redaction of messages before they are stored. A call with redacted text is not trained on."""

    secrets: bool = True
    """Redact text that looks like an API key, a token or a private key."""
    patterns: list[str] = []
    """Regular expressions whose matches are also redacted."""


class GatewayConfig(Section):
    """The HTTP server that agents send their model calls to."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on; 0 picks a free port."""
    request_timeout: Seconds = 600.0
    """Timeout of one model call, in seconds."""
    max_body: Positive = 16 * 1024 * 1024
    """Maximum size of a request body, in bytes."""
    max_sessions_in_memory: Positive = 1024
    """Maximum number of sessions kept in memory; other sessions are read from the store when needed."""
    max_in_flight: Positive = 1024
    """Maximum number of concurrent model calls; further calls are rejected with 429."""
    max_messages: Positive = 20_000
    """Maximum number of messages in one request."""
    max_tools: Positive = 2048
    """Maximum number of tools in one request."""
    max_header: Positive = 64 * 1024
    """Maximum size of the request line and headers, in bytes."""
    read_timeout: Seconds = 60.0
    """Timeout for reading a request, and for a client to read the end of a stream, in seconds."""
    idle_timeout: Seconds = 1800.0
    """Time without a call after which a live session is closed, in seconds."""
    redact: RedactConfig = RedactConfig()


class ModelRoute(Section):
    """The engine or upstream that answers requests for a model name."""

    upstream: str | None = None
    """Name of an entry in `upstreams`. Default: the run's engine."""
    trainable: bool = True
    """Allow training on the calls. If false, calls are only recorded."""
