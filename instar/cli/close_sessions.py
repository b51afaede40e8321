"""`instar sessions close`: complete open live sessions."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Annotated

import msgspec
import typer

from instar.async_utils import map_concurrently
from instar.cli.filters import parse_duration
from instar.cli.options import AsJson, RunDir, SessionIds, async_command
from instar.cli.output import print_result
from instar.cli.run_store import open_run_store
from instar.cluster.control import ControlRequest, send_control_request
from instar.cluster.layout import RunFolder
from instar.errors import ConfigError, InstarError
from instar.gateway.auth import create_key
from instar.gateway.base import CompleteSession, EndedSession
from instar.http.client import HttpClient, NoResponse
from instar.store.base import Store
from instar.types import Channel

REASON = "closed with `instar sessions close`"
MAX_CONCURRENT_REQUESTS = 16


@async_command
async def close_sessions(
    run_dir: RunDir,
    session_ids: SessionIds = None,
    close_all: Annotated[bool, typer.Option("--all", help="Close all open live sessions.")] = False,
    idle: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Close live sessions without a call for this long, e.g. 3h."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Close open live sessions: they are completed, and can be scored and trained on. A later call of the
    same conversation opens a new session."""
    if sum((bool(session_ids), close_all, idle is not None)) != 1:
        raise ConfigError(
            "Select the sessions to close with session ids, with --all or with --idle DURATION."
        )
    seconds = None if idle is None else parse_duration(idle)
    if idle is not None and seconds is None:
        raise ConfigError(
            f"--idle: {idle!r} is not a duration; use a number with a unit: 90s, 15m, 3h or 2d."
        )
    async with open_run_store(run_dir) as (config, store):
        before = math.inf if seconds is None else time.time() - seconds
        if session_ids:
            await _require_live(store, config.name, session_ids)
        open_ids = session_ids or await store.list_idle_sessions(config.name, before)
        gateway_url = await _find_running_gateway(RunFolder(run_dir))
        if gateway_url is None:
            count = await store.complete_sessions(open_ids, REASON)
        else:
            count = await complete_in_gateway(store, gateway_url, open_ids)
    print_result(as_json, {"closed": count}, f"{count} session(s) closed")


async def _require_live(store: Store, run_id: str, session_ids: Sequence[str]) -> None:
    for session_id in session_ids:
        session = await store.session(session_id)
        if session is None or session.run_id != run_id:
            raise ConfigError(f"There is no session {session_id} in this run; see `instar sessions ls`.")
        if session.channel is not Channel.LIVE:
            raise ConfigError(
                f"The session {session_id} is on the channel {session.channel}, and the run's rollout ends "
                "it; only sessions on the channel live can be closed."
            )


async def _find_running_gateway(folder: RunFolder) -> str | None:
    """Return the URL of the run's gateway, or None if the run is not running."""
    with suppress(FileNotFoundError, ConnectionError):
        roles = await send_control_request(folder.control_socket, ControlRequest("list"))
        return next((role.address for role in roles if role.role == "gateway"), None)
    return None


async def complete_in_gateway(store: Store, url: str, session_ids: Sequence[str]) -> int:
    """Complete the sessions through the gateway, which has the open ones in memory and would otherwise add
    later calls to them. Return how many were open."""
    name = f"close-{secrets.token_hex(4)}"
    key = await create_key(store, "admin", None, name)
    client = HttpClient(headers={"Authorization": f"Bearer {key}"}, secret=key)
    body = msgspec.json.encode(CompleteSession(reason=REASON))

    async def complete(session_id: str) -> bool:
        try:
            response = await client.post(f"{url}/sessions/{session_id}/complete", body)
        except NoResponse as error:
            raise InstarError(
                f"Cannot close the session {session_id}: the gateway failed: {error}"
            ) from error
        if response.status == HTTPStatus.NOT_FOUND:
            return False  # its data was deleted in the meantime
        if not response.is_success:
            raise InstarError(
                f"The gateway refused to close the session {session_id}: HTTP {response.status}: "
                f"{response.excerpt()}"
            )
        return msgspec.json.decode(response.body, type=EndedSession).changed

    try:
        return sum(await map_concurrently(complete, session_ids, MAX_CONCURRENT_REQUESTS))
    finally:
        await client.close()
        await store.revoke_key(name)
