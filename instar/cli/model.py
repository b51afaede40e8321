"""The model of a run, fetched and converted before any role needs it."""

from __future__ import annotations

from rich.console import Console

from instar.config import CloudConfig, RunConfig
from instar.models import is_cached, resolve_model, resolve_tokenizer


def get_model(config: RunConfig, console: Console) -> None:
    """Of a run that a service trains, the tokenizer alone. Raises ConfigError when there is no such model."""
    name = config.model.name
    is_path = name.startswith((".", "~", "/"))
    elsewhere = isinstance(config.backend, CloudConfig)
    if not is_path and not is_cached(name):
        what = "tokenizer of" if elsewhere else "model"
        console.print(f"Getting the {what} {name} (once; it is kept in the cache) ...", highlight=False)
    resolve_tokenizer(name) if elsewhere else resolve_model(name)
