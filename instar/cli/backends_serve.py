"""`instar backends serve`: the local backend behind Tinker's or Weaver's wire protocol."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from instar.config import ModelConfig
from instar.errors import ConfigError
from instar.gateway.auth import MIN_KEY_LENGTH, MIN_REMOTE_KEY_LENGTH, is_loopback
from instar.models import is_cached, resolve_model
from instar.protocol.base import ServiceLimits
from instar.protocol.serve import serve_protocol

KEYS = "INSTAR_PROTOCOL_KEYS"
"""Environment variable with the keys that are let in, with commas between them."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a protocol's clients ask of a key, and which variables they read."""

    new_key: str
    prefixes: tuple[str, ...]
    """One of which a key begins with; none: any will do."""
    services: tuple[str, ...]
    """Whose SDKs speak it, as their variables begin."""


DIALECTS = {
    "tinker": Dialect("tml-", ("tml-", "sk-"), ("TINKER", "MINT")),
    "weaver": Dialect("weaver-", (), ("WEAVER",)),
}


def run_serve_protocol(
    *,
    protocol: str,
    model: ModelConfig,
    host: str,
    port: int,
    folder: Path | None,
    as_json: bool,
    threads: int | None = None,
    max_models: int = ServiceLimits.max_models,
) -> None:
    """Until Ctrl-C. What is printed on stdout with ``as_json`` is one line, once clients may come."""
    console = Console(stderr=as_json)
    dialect = DIALECTS[protocol]
    given = given_keys(os.environ, protocol, host)
    keys = given or [f"{dialect.new_key}{secrets.token_urlsafe(32)}"]
    folder = folder or Path("runs") / f"serve-{protocol}"
    name = model.name
    if not is_cached(name):
        console.print(f"Getting the model {name} ...", highlight=False, markup=False)
    resolve_model(name)

    def ready(url: str) -> None:
        if as_json:
            facts = {"url": url, "base_model": name, "dir": str(folder)}
            print(json.dumps(facts if given else facts | {"api_key": keys[0]}), flush=True)
        for line in _directions(dialect, url, name, folder, None if given else keys[0]):
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    async def serve() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await serve_protocol(
            protocol,
            model,
            folder=folder,
            keys=keys,
            host=host,
            port=port,
            threads=threads,
            limits=ServiceLimits(max_models=max_models),
            ready=ready,
            stop=stop,
        )

    asyncio.run(serve())


def given_keys(environment: Mapping[str, str], protocol: str, host: str) -> list[str]:
    """Those of the environment; none where it says nothing. Raises ConfigError, which tells no key, for one
    that could be guessed or that no client could send."""
    keys = [key.strip() for key in environment.get(KEYS, "").split(",") if key.strip()]
    shortest = MIN_KEY_LENGTH if is_loopback(host) else MIN_REMOTE_KEY_LENGTH
    prefixes = DIALECTS[protocol].prefixes
    for place, key in enumerate(keys, 1):
        if len(key) < shortest:
            raise ConfigError(
                f"{KEYS}: key {place} has {len(key)} characters, too few for a server on {host}; give a "
                f"random one of {shortest} or more"
            )
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ConfigError(f"{KEYS}: key {place} has characters that no HTTP header can carry")
        if prefixes and not key.startswith(prefixes):
            raise ConfigError(
                f"{KEYS}: key {place} begins with none of {', '.join(prefixes)}, as {protocol}'s clients "
                "ask of a key"
            )
    return keys


def _directions(dialect: Dialect, url: str, model: str, folder: Path, new_key: str | None) -> Sequence[str]:
    key = new_key or f"<a key of {KEYS}>"
    lines = [f"Serving {model} at {url}. Point a client at it:\n"]
    lines += [f"  export {name}_BASE_URL={url} {name}_API_KEY={key}" for name in dialect.services]
    lines.append(f"\nCheckpoints are kept in {folder}. Ctrl-C stops.")
    if new_key:
        lines.append(f"They belong to the key: set {KEYS} to it to find them again after a restart.")
    return lines
