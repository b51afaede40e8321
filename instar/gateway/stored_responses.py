"""Look up earlier responses by id: for requests that refer to them, and for the routes that return them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import orjson

from instar.gateway.auth import Action, Caller, is_allowed
from instar.gateway.base import ApiError, invalid_value
from instar.gateway.context import GatewayContext
from instar.gateway.dialects import responses_stored
from instar.gateway.session_states import SessionStates
from instar.store.base import StoredReply
from instar.types import Call, CallStatus, Json, Session

_DEFAULT_PAGE_SIZE = 20
_MAX_PAGE_SIZE = 100


@dataclass(slots=True, eq=False)
class StoredResponses:
    _context: GatewayContext
    _states: SessionStates

    async def find(
        self, caller: Caller, response_ids: Iterable[str], action: Action
    ) -> tuple[dict[str, StoredReply], set[str]]:
        """Return the first stored reply to each request of the run, by response id, and the ids of replies
        that exist but may not be used: those of other sessions, and those with ``store: false``."""
        replies: dict[str, StoredReply] = {}
        refused: set[str] = set()
        sessions: dict[str, Session | None] = {}
        for reply in await self._context.store.replies(list(response_ids)):
            session_id = reply.session_id
            if session_id not in sessions:
                state = await self._states.find(session_id)
                sessions[session_id] = (
                    state.session if state else await self._context.store.session(session_id)
                )
            session = sessions[session_id]
            is_stored = (reply.response_fields or {}).get("store") is not False
            if session is None or not is_stored or not is_allowed(caller, action, session):
                refused.add(reply.request_id)
            elif session.run_id == self._context.identity.run_id:
                replies.setdefault(reply.request_id, reply)
        return replies, refused - replies.keys()

    async def get(self, caller: Caller, response_id: str, session_id: str | None) -> bytes:
        """Return a response as it was returned to its request. ``session_id`` is the session that the URL
        names, if any. Raise ApiError (404) if the caller may not read such a response, or if it was not
        stored."""
        return responses_stored.format_stored_response(*await self._load(caller, response_id, session_id))

    async def list_input_items(
        self, caller: Caller, response_id: str, session_id: str | None, query: Mapping[str, str]
    ) -> bytes:
        """Return a page of the items that preceded the response, by default the newest ones first. Raise
        ApiError like `get`, or (400) if a query parameter is invalid."""
        items = responses_stored.list_input_items(*await self._load(caller, response_id, session_id))
        order, limit = query.get("order", "desc"), query.get("limit", str(_DEFAULT_PAGE_SIZE))
        if order not in ("asc", "desc"):
            raise invalid_value(f"'order' is {order!r}; it must be 'asc' or 'desc'.", "order")
        if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= _MAX_PAGE_SIZE:
            message = f"'limit' is {limit!r}; it must be a number between 1 and {_MAX_PAGE_SIZE}."
            raise invalid_value(message, "limit")
        if order == "desc":
            items.reverse()
        ids = [item["id"] for item in items]
        start = 0
        if (after := query.get("after")) is not None:
            if after not in ids:
                raise invalid_value(f"'after' is {after!r}; the response has no such input item.", "after")
            start = ids.index(after) + 1
        end = start + int(limit)
        page: Json = {"object": "list", "data": items[start:end], "has_more": end < len(items)}
        first, last = (ids[start:end][0], ids[start:end][-1]) if items[start:end] else (None, None)
        return orjson.dumps({**page, "first_id": first, "last_id": last})

    async def _load(self, caller: Caller, response_id: str, session_id: str | None) -> tuple[Call, Json]:
        """Return the call of a stored response, and its response fields."""
        replies, _ = await self.find(caller, [response_id], Action.READ_SESSION)
        reply = replies.get(response_id)
        fields = reply.response_fields if reply and session_id in (None, reply.session_id) else None
        call = await self._context.store.call(reply.call_id) if reply and fields else None
        if call is None or fields is None or call.status is not CallStatus.OK:
            raise ApiError(404, f"Response with id {response_id!r} not found.")
        return call, fields
