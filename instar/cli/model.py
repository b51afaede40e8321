"""Download and convert a run's model before its processes start."""

from __future__ import annotations

from rich.console import Console

from instar.config import CloudConfig, RunConfig
from instar.models import is_local, resolve_model, resolve_tokenizer


def fetch_model(config: RunConfig, console: Console) -> None:
    """Download the model, or only its tokenizer if a cloud service trains it, unless it is cached. Raises
    ConfigError if the model does not exist."""
    name = config.model.name
    is_path = name.startswith((".", "~", "/"))
    is_cloud = isinstance(config.backend, CloudConfig)
    if not is_path and not is_local(name):
        download = f"the tokenizer of {name}" if is_cloud else f"the model {name}"
        console.print(f"Downloading {download} ...", highlight=False)
    resolve_tokenizer(name) if is_cloud else resolve_model(name)
