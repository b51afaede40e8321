"""The model of a run, fetched and converted before any role needs it."""

from __future__ import annotations

from rich.console import Console

from instar.models import is_cached, resolve_model


def get_model(name: str, console: Console) -> None:
    """Raises ConfigError when there is no such model."""
    is_path = name.startswith((".", "~", "/"))
    if not is_path and not is_cached(name):
        console.print(f"Getting the model {name} (once; it is kept in the cache) ...", highlight=False)
    resolve_model(name)
