"""Download and convert a run's model before its processes start."""

from __future__ import annotations

from rich.console import Console

from instar.config import CloudConfig, RunConfig
from instar.models import is_cached, resolve_model, resolve_tokenizer


def fetch_model(config: RunConfig, console: Console) -> None:
    """Download the model unless it is cached, or only its tokenizer if a cloud service trains the model.
    Raises ConfigError if the model does not exist."""
    name = config.model.name
    is_path = name.startswith((".", "~", "/"))
    is_cloud = isinstance(config.backend, CloudConfig)
    if not is_path and not is_cached(name):
        part = "tokenizer of" if is_cloud else "model"
        console.print(f"Downloading the {part} {name} into the cache ...", highlight=False)
    resolve_tokenizer(name) if is_cloud else resolve_model(name)
