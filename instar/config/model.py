"""The model, and where a run keeps its rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from instar.config.base import DType, Positive, Seconds, Section, type_shorthand


class ModelConfig(Section):
    """Which model is served and trained."""

    name: str = "smollm2-135m"
    """`smollm2-135m` (from the package registry), a Hugging Face id, or a folder (`./folder`)."""
    dtype: DType = "auto"
    """Of the base weights. `auto` is bf16 where the processor computes it fast, else fp32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU when there is one."""
    max_context: Positive = 2048
    """Longest prompt + reply, in tokens."""
    tool_format: Literal["auto", "template", "generic"] = "auto"
    """How tools reach the model: through its own chat template, or by the generic format of
    docs/concepts.md. `auto` takes the template where it knows tools."""


class SqliteStoreConfig(Section):
    """The embedded store: one file, one writer per process."""

    type: Literal["sqlite"] = "sqlite"
    path: Path | None = None
    """The database file. Default: `store.db` in the run's folder."""


class PostgresStoreConfig(Section):
    """A PostgreSQL server, for runs that write from several hosts. Needs `instar[postgres]`."""

    type: Literal["postgres"] = "postgres"
    url: str = "postgresql:///instar"
    """Its address, as libpq takes it, without a password: that is for `password_env` or a `.pgpass` file. A
    connection pooler in between must keep sessions."""
    password_env: str = "INSTAR_POSTGRES_PASSWORD"
    """Environment variable with the password, where the server asks for one; without it, `PGPASSWORD`."""
    db_schema: Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_]{0,62}$")] = "instar"
    """The schema that holds the tables; made where there is none. Runs of one schema see each other."""
    pool: Positive = 4
    """Connections for reading, per process."""
    timeout: Seconds = 30.0
    """Of one statement, and of connecting; also how long a lost connection is tried again."""

    @field_validator("url")
    @classmethod
    def _without_password(cls, url: str) -> str:
        if re.search(r"://[^/?#]*:[^/?#]*@|\b(?:ssl)?password\s*=", url, re.IGNORECASE):
            raise ValueError(
                "it holds a password, and is kept with the run: leave it to password_env or ~/.pgpass"
            )
        return url

    def password_env_name(self, environment: Mapping[str, str]) -> str | None:
        """The one that holds the password, where one does. No agent is to have it."""
        return next((name for name in (self.password_env, "PGPASSWORD") if environment.get(name)), None)


StoreConfig = Annotated[
    SqliteStoreConfig | PostgresStoreConfig, Field(discriminator="type"), type_shorthand("sqlite")
]
