"""`instar backends serve`: serve the local backend with Tinker's or Weaver's wire protocol."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from instar.cli.options import AsJson
from instar.cli.output import print_json
from instar.cluster.interrupts import handle_interrupts
from instar.config import ModelConfig
from instar.errors import ConfigError
from instar.gateway.auth import MIN_KEY_LENGTH, MIN_REMOTE_KEY_LENGTH, is_loopback
from instar.models import is_local, resolve_model
from instar.protocol.base import ServiceLimits
from instar.protocol.serve import serve_protocol

KEYS_ENV = "INSTAR_PROTOCOL_KEYS"
"""Environment variable with the accepted keys, separated by commas. If unset, a key is generated."""


@dataclass(frozen=True, slots=True)
class ClientConvention:
    """The key format and the environment variables of the SDKs that use a protocol."""

    new_key_prefix: str
    accepted_prefixes: tuple[str, ...]
    """The prefixes that a key may have, or empty if a key needs no prefix."""
    variable_prefixes: tuple[str, ...]


CONVENTIONS = {
    "tinker": ClientConvention("tml-", ("tml-", "sk-"), ("TINKER", "MINT")),
    "weaver": ClientConvention("weaver-", (), ("WEAVER",)),
}


def serve(
    model: Annotated[str, typer.Option(help="The base model: a name, an id or a path, as in `model.name`.")],
    protocol: Annotated[Literal["tinker", "weaver"], typer.Option(help="The protocol to serve.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free port.")] = 0,
    folder: Annotated[Path | None, typer.Option("--dir", help="Folder for checkpoints.")] = None,
    dtype: Annotated[
        Literal["auto", "bf16", "fp32"], typer.Option(help="Data type of the base weights.")
    ] = "auto",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Device to use.")] = "auto",
    context: Annotated[int, typer.Option(min=1, help="Maximum sequence length, in tokens.")] = 2048,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Number of torch CPU threads. Default: all cores.")
    ] = None,
    max_models: Annotated[
        int, typer.Option(min=1, help="Maximum number of models to train at once.")
    ] = ServiceLimits().max_models,
    as_json: AsJson = False,
) -> None:
    """Serve the local backend to programs written for Tinker, MinT or Weaver, until Ctrl-C."""
    console = Console(stderr=as_json)
    convention = CONVENTIONS[protocol]
    configured_keys = read_configured_keys(os.environ, protocol, host)
    keys = configured_keys or [f"{convention.new_key_prefix}{secrets.token_urlsafe(32)}"]
    new_key = None if configured_keys else keys[0]
    checkpoints = folder or Path("runs") / f"serve-{protocol}"
    if not is_local(model):
        console.print(f"Downloading the model {model} ...", highlight=False, markup=False)
    resolve_model(model)

    async def run() -> None:
        stop = asyncio.Event()
        with handle_interrupts() as interrupts:

            def handle_ready(url: str) -> None:
                interrupts.on_first_signal = stop.set
                if as_json:
                    details = {"url": url, "base_model": model, "dir": str(checkpoints)}
                    print_json(details | ({"api_key": new_key} if new_key else {}))
                for line in _format_instructions(convention, url, model, checkpoints, new_key):
                    console.print(line, highlight=False, markup=False, soft_wrap=True)

            await serve_protocol(
                protocol,
                ModelConfig(name=model, dtype=dtype, device=device, max_context=context),
                folder=checkpoints,
                keys=keys,
                host=host,
                port=port,
                threads=threads,
                limits=ServiceLimits(max_models=max_models),
                on_ready=handle_ready,
                stop=stop,
            )

    asyncio.run(run())


def read_configured_keys(environment: Mapping[str, str], protocol: str, host: str) -> list[str]:
    """Return the keys in the environment. Raises ConfigError if a key is too short for this host, or if the
    protocol's clients could not send it. The message does not contain the key."""
    keys = [key.strip() for key in environment.get(KEYS_ENV, "").split(",") if key.strip()]
    min_length = MIN_KEY_LENGTH if is_loopback(host) else MIN_REMOTE_KEY_LENGTH
    prefixes = CONVENTIONS[protocol].accepted_prefixes
    for number, key in enumerate(keys, 1):
        if len(key) < min_length:
            raise ConfigError(
                f"{KEYS_ENV}: key {number} must have at least {min_length} characters for a server on "
                f"{host}, got {len(key)}."
            )
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ConfigError(
                f"{KEYS_ENV}: key {number} has characters that an HTTP header cannot contain; use printable "
                "ASCII characters without spaces."
            )
        if prefixes and not key.startswith(prefixes):
            raise ConfigError(
                f"{KEYS_ENV}: key {number} must start with {' or '.join(prefixes)}, as {protocol} clients "
                "require."
            )
    return keys


def _format_instructions(
    convention: ClientConvention, url: str, model: str, folder: Path, new_key: str | None
) -> Sequence[str]:
    key = new_key or f"<a key from {KEYS_ENV}>"
    lines = [f"Serving {model} at {url}. Connect a client with:\n"]
    lines += [f"  export {name}_BASE_URL={url} {name}_API_KEY={key}" for name in convention.variable_prefixes]
    lines.append(f"\nCheckpoints are saved in {folder}. Press Ctrl-C to stop.")
    if new_key:
        lines.append(
            f"Checkpoints belong to this key. To use them after a restart, set {KEYS_ENV} to this key."
        )
    return lines
