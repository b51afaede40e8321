"""The order of a model's calls.

Weaver's SDK numbers passes, steps and exports, but neither saves nor loads. A call without a number must run
after all calls that arrived before it and before all that arrive later. It gets a number of its own here, and
the numbers that follow move up by one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from instar.protocol.base import ProtocolError


class WeaverCallOrder:
    """Assigns sequence ids to the calls of one model. ``submit`` receives the sequence id and returns the
    operation's id; if it raises, the sequence id stays free."""

    def __init__(self) -> None:
        self._calls: dict[int, str | None] = {}
        self._highest = 0
        self._inserted: list[int] = []
        """The highest number that had arrived before each call without a number."""

    def submit_numbered(self, seq: int, call_id: str | None, submit: Callable[[int], str]) -> str:
        """Submit a call with the client's sequence id and return the operation's id. ``call_id`` is the same
        when a call is sent again, or None if it is unknown. Raises ProtocolError 409 if a different call has
        the sequence id."""
        known = self._calls.get(seq)
        if known is not None and call_id is not None and known != call_id:
            raise ProtocolError(
                f"sequence id {seq} was used by another call: only one client at a time may train a model. "
                "To continue elsewhere, create a model and load a saved state",
                409,
            )
        operation_id = submit(seq + bisect_left(self._inserted, seq))
        self._calls[seq] = call_id
        self._highest = max(self._highest, seq)
        return operation_id

    def submit_unnumbered(self, submit: Callable[[int], str]) -> str:
        """Submit a call without a number and return the operation's id. A call that is sent again runs twice,
        which is harmless for a save or a load."""
        operation_id = submit(self._highest + len(self._inserted) + 1)
        self._inserted.append(self._highest)
        return operation_id
