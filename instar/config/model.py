"""The model, and where a run keeps its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from instar.config.base import DType, Positive, Seconds, Section, by_word


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
    """Its address, as libpq takes it. A password is better left to `password_env` or to a `.pgpass` file."""
    password_env: str = "INSTAR_POSTGRES_PASSWORD"
    """Environment variable with the password, where the server asks for one."""
    db_schema: str = "instar"
    """The schema that holds the tables; made where there is none. Runs of one schema see each other."""
    pool: Positive = 4
    """Connections for reading, per process."""
    timeout: Seconds = 30.0
    """Of one statement, and of connecting; also how long a lost connection is tried again."""


StoreConfig = Annotated[
    SqliteStoreConfig | PostgresStoreConfig, Field(discriminator="type"), by_word("sqlite")
]
