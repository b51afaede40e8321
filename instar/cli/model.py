"""Download and convert a run's model before its processes start."""

from __future__ import annotations

import os

from rich.console import Console

from instar.backends.resolve import resolve_run
from instar.config import CloudConfig, RunConfig, UpstreamEngineConfig
from instar.models import is_local, resolve_model, resolve_tokenizer


def fetch_served_model(config: RunConfig, console: Console) -> None:
    """Check the backend and the engine, and download the model unless a provider serves it."""
    resolved, _ = resolve_run(config, os.environ)
    if not isinstance(config.engine, UpstreamEngineConfig):
        fetch_model(resolved, console)


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
