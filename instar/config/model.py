"""The model and the store."""

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
    """Model to use: `smollm2-135m` (from the package registry), a Hugging Face id, or a path (`./folder`)."""
    dtype: DType = "auto"
    """Precision of the base weights. `auto`: bf16 if the processor computes fast in bf16, else fp32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to run on. `auto`: a GPU if there is one."""
    max_context: Positive = 2048
    """Maximum length of prompt and reply together, in tokens."""
    tool_format: Literal["auto", "template", "generic"] = "auto"
    """How tools are shown to the model: with its chat template, or in the generic format of docs/concepts.md.
    `auto`: with the template if it supports tools."""


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
    """Environment variable with the password, if the server needs one. Default if unset: `PGPASSWORD`."""
    db_schema: Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_]{0,62}$")] = "instar"
    """Schema with the tables, created if missing. Runs in the same schema see each other."""
    pool: Positive = 4
    """Number of connections for reading, per process."""
    timeout: Seconds = 30.0
    """Timeout of a statement, of a connection attempt and of all attempts to reconnect, in seconds."""

    @field_validator("url")
    @classmethod
    def _without_password(cls, url: str) -> str:
        if re.search(r"://[^/?#]*:[^/?#]*@|\b(?:ssl)?password\s*=", url, re.IGNORECASE):
            raise ValueError(
                "contains a password, but is saved with the run; use password_env or ~/.pgpass instead"
            )
        return url

    def password_env_name(self, environment: Mapping[str, str]) -> str | None:
        """Return the name of the variable with the password, if any. Agents must not inherit the variable."""
        return next((name for name in (self.password_env, "PGPASSWORD") if environment.get(name)), None)


StoreConfig = Annotated[
    SqliteStoreConfig | PostgresStoreConfig, Field(discriminator="type"), type_shorthand("sqlite")
]
