from __future__ import annotations

import random

import pytest

from instar.protocol.base import ProtocolError
from instar.protocol.weaver.training import WeaverCallOrder


class SubmittedCalls:
    """Records the calls that a `WeaverCallOrder` submits, by position."""

    def __init__(self) -> None:
        self.order = WeaverCallOrder()
        self.positions: dict[int, str] = {}

    def submit_numbered(self, seq: int, call_id: str | None) -> str:
        return self.order.submit_numbered(
            seq, call_id, lambda position, _: self.positions.setdefault(position, f"seq {seq}")
        )

    def submit_unnumbered(self, name: str) -> str:
        return self.order.submit_unnumbered(lambda position, _: self.positions.setdefault(position, name))

    def list_in_order(self) -> list[str]:
        assert sorted(self.positions) == list(range(1, len(self.positions) + 1))
        return [self.positions[position] for position in sorted(self.positions)]


def test_unnumbered_call_runs_after_the_calls_that_arrived_before_it() -> None:
    calls = SubmittedCalls()
    calls.submit_unnumbered("load")
    calls.submit_numbered(1, "b")
    calls.submit_numbered(2, "c")
    calls.submit_unnumbered("save")
    calls.submit_unnumbered("second save")
    calls.submit_numbered(3, "f")
    assert calls.list_in_order() == ["load", "seq 1", "seq 2", "save", "second save", "seq 3"]


def test_numbered_calls_may_arrive_late() -> None:
    calls = SubmittedCalls()
    calls.submit_numbered(3, "c")
    calls.submit_unnumbered("save")
    calls.submit_numbered(1, "a")
    calls.submit_numbered(4, "e")
    calls.submit_numbered(2, "b")
    assert calls.list_in_order() == ["seq 1", "seq 2", "seq 3", "save", "seq 4"]


def test_repeated_call_keeps_its_position() -> None:
    calls = SubmittedCalls()
    calls.submit_numbered(1, "a")
    calls.submit_numbered(1, "a")
    calls.submit_unnumbered("save")
    calls.submit_numbered(2, "c")
    calls.submit_numbered(1, "a")
    assert calls.list_in_order() == ["seq 1", "save", "seq 2"]


def test_calls_that_arrive_in_any_order_are_submitted_in_sequence_order() -> None:
    for seed in range(50):
        rng, calls = random.Random(seed), SubmittedCalls()
        remaining = list(range(1, 20))
        while remaining:
            if rng.random() < 0.3:
                calls.submit_unnumbered(f"save {rng.random()}")
            seq = remaining.pop(rng.randrange(min(3, len(remaining))))
            calls.submit_numbered(seq, f"call {seq}")
        numbered = [name for name in calls.list_in_order() if name.startswith("seq")]
        assert numbered == [f"seq {seq}" for seq in range(1, 20)]


def test_sequence_id_of_a_different_call_is_rejected() -> None:
    calls = SubmittedCalls()
    calls.submit_numbered(1, "a")
    with pytest.raises(ProtocolError, match="a different call") as caught:
        calls.submit_numbered(1, "b")
    assert caught.value.status == 409
    calls.submit_numbered(1, None)


def test_failed_submission_leaves_the_order_unchanged() -> None:
    def reject(position: int, offset: int) -> str:
        raise ProtocolError("too many", 429)

    calls = SubmittedCalls()
    with pytest.raises(ProtocolError, match="too many"):
        calls.order.submit_numbered(1, "a", reject)
    with pytest.raises(ProtocolError, match="too many"):
        calls.order.submit_unnumbered(reject)
    calls.submit_numbered(1, "c")
    calls.submit_unnumbered("save")
    assert calls.list_in_order() == ["seq 1", "save"]
