from __future__ import annotations

import random

import pytest

from instar.protocol.base import ProtocolError
from instar.protocol.weaver.training import WeaverCallOrder


class Lane:
    """Takes what is submitted, by place."""

    def __init__(self) -> None:
        self.order = WeaverCallOrder()
        self.places: dict[int, str] = {}

    def submit_numbered(self, seq: int, call: str | None) -> str:
        return self.order.submit_numbered(
            seq, call, lambda place: self.places.setdefault(place, f"seq {seq}")
        )

    def submit_unnumbered(self, name: str) -> str:
        return self.order.submit_unnumbered(lambda place: self.places.setdefault(place, name))

    def sequence(self) -> list[str]:
        assert sorted(self.places) == list(range(1, len(self.places) + 1))
        return [self.places[place] for place in sorted(self.places)]


def test_unnumbered_call_keeps_its_arrival_order() -> None:
    queue = Lane()
    queue.submit_unnumbered("load")
    queue.submit_numbered(1, "b")
    queue.submit_numbered(2, "c")
    queue.submit_unnumbered("save")
    queue.submit_unnumbered("save again")
    queue.submit_numbered(3, "f")
    assert queue.sequence() == ["load", "seq 1", "seq 2", "save", "save again", "seq 3"]


def test_numbered_calls_may_arrive_late() -> None:
    queue = Lane()
    queue.submit_numbered(3, "c")
    queue.submit_unnumbered("save")
    queue.submit_numbered(1, "a")
    queue.submit_numbered(4, "e")
    queue.submit_numbered(2, "b")
    assert queue.sequence() == ["seq 1", "seq 2", "seq 3", "save", "seq 4"]


def test_repeated_call_keeps_its_sequence_id() -> None:
    queue = Lane()
    for call in ("a", "a"):
        queue.submit_numbered(1, call)
    queue.submit_unnumbered("save")
    queue.submit_numbered(2, "c")
    queue.submit_numbered(1, "a")
    assert queue.sequence() == ["seq 1", "save", "seq 2"]


def test_every_sequence_id_is_used_once_in_any_order() -> None:
    for seed in range(50):
        rng, queue = random.Random(seed), Lane()
        waiting = list(range(1, 20))
        while waiting:
            if rng.random() < 0.3:
                queue.submit_unnumbered(f"save {rng.random()}")
            seq = waiting.pop(rng.randrange(min(3, len(waiting))))
            queue.submit_numbered(seq, f"call {seq}")
        submit_numbered = [name for name in queue.sequence() if name.startswith("seq")]
        assert submit_numbered == [f"seq {seq}" for seq in range(1, 20)]


def test_sequence_id_of_another_call_is_rejected() -> None:
    queue = Lane()
    queue.submit_numbered(1, "a")
    with pytest.raises(ProtocolError, match="another call") as caught:
        queue.submit_numbered(1, "b")
    assert caught.value.status == 409
    queue.submit_numbered(1, None)


def test_failed_submission_leaves_the_order_unchanged() -> None:
    def refuse(place: int) -> str:
        raise ProtocolError("too many", 429)

    queue = Lane()
    with pytest.raises(ProtocolError, match="too many"):
        queue.order.submit_numbered(1, "a", refuse)
    with pytest.raises(ProtocolError, match="too many"):
        queue.order.submit_unnumbered(refuse)
    queue.submit_numbered(1, "c")
    queue.submit_unnumbered("save")
    assert queue.sequence() == ["seq 1", "save"]
