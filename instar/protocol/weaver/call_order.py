"""Where a call stands among the calls of its model.

Weaver's SDK numbers passes, steps and exports, but neither saves nor loads. A call without a number belongs
after all that its model was asked before, and before all that it is asked later; here it gets a number of its
own, and the numbers that follow move up by one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from instar.protocol.base import ProtocolError


class WeaverCallOrder:
    """Of one model. ``submit`` is given the place and returns the operation; when it raises, the place is
    still free."""

    def __init__(self) -> None:
        self._calls: dict[int, str | None] = {}
        self._highest = 0
        self._inserted: list[int] = []
        """For each call without a number, the highest number there was before it."""

    def submit_numbered(self, seq: int, request: str | None, submit: Callable[[int], str]) -> str:
        """``call`` tells two calls apart and is the same when one is sent again; None: unknown. Raises
        ProtocolError 409 when another call has the client's sequence id."""
        known = self._calls.get(seq)
        if known is not None and request is not None and known != request:
            raise ProtocolError(
                f"sequence id {seq} was used by another call: one client at a time may train a model. Create "
                "a model and load a saved state to go on elsewhere",
                409,
            )
        operation = submit(seq + bisect_left(self._inserted, seq))
        self._calls[seq] = request
        self._highest = max(self._highest, seq)
        return operation

    def submit_unnumbered(self, submit: Callable[[int], str]) -> str:
        """Sent again it stands, and is done, twice: to save or to load twice is to do it once."""
        operation = submit(self._highest + len(self._inserted) + 1)
        self._inserted.append(self._highest)
        return operation
