from __future__ import annotations

import random

import pytest

from instar.protocol.base import ProtocolError
from instar.protocol.weaver.order import Order


class Lane:
    """Takes what is submitted, by place."""

    def __init__(self) -> None:
        self.order = Order()
        self.places: dict[int, str] = {}

    def numbered(self, seq: int, call: str | None) -> str:
        return self.order.numbered(seq, call, lambda place: self.places.setdefault(place, f"seq {seq}"))

    def unnumbered(self, name: str) -> str:
        return self.order.unnumbered(lambda place: self.places.setdefault(place, name))

    def sequence(self) -> list[str]:
        assert sorted(self.places) == list(range(1, len(self.places) + 1))
        return [self.places[place] for place in sorted(self.places)]


def test_a_call_without_a_number_stands_where_it_came() -> None:
    lane = Lane()
    lane.unnumbered("load")
    lane.numbered(1, "b")
    lane.numbered(2, "c")
    lane.unnumbered("save")
    lane.unnumbered("save again")
    lane.numbered(3, "f")
    assert lane.sequence() == ["load", "seq 1", "seq 2", "save", "save again", "seq 3"]


def test_numbers_may_come_late() -> None:
    lane = Lane()
    lane.numbered(3, "c")
    lane.unnumbered("save")
    lane.numbered(1, "a")
    lane.numbered(4, "e")
    lane.numbered(2, "b")
    assert lane.sequence() == ["seq 1", "seq 2", "seq 3", "save", "seq 4"]


def test_what_is_sent_again_keeps_its_place() -> None:
    lane = Lane()
    for call in ("a", "a"):
        lane.numbered(1, call)
    lane.unnumbered("save")
    lane.numbered(2, "c")
    lane.numbered(1, "a")
    assert lane.sequence() == ["seq 1", "save", "seq 2"]


def test_every_place_is_filled_once_whatever_the_order() -> None:
    for seed in range(50):
        rng, lane = random.Random(seed), Lane()
        waiting = list(range(1, 20))
        while waiting:
            if rng.random() < 0.3:
                lane.unnumbered(f"save {rng.random()}")
            seq = waiting.pop(rng.randrange(min(3, len(waiting))))
            lane.numbered(seq, f"call {seq}")
        numbered = [name for name in lane.sequence() if name.startswith("seq")]
        assert numbered == [f"seq {seq}" for seq in range(1, 20)]


def test_a_sequence_id_belongs_to_one_call() -> None:
    lane = Lane()
    lane.numbered(1, "a")
    with pytest.raises(ProtocolError, match="another call") as caught:
        lane.numbered(1, "b")
    assert caught.value.status == 409
    lane.numbered(1, None)


def test_a_call_that_was_not_taken_leaves_no_trace() -> None:
    def refuse(place: int) -> str:
        raise ProtocolError("too many", 429)

    lane = Lane()
    with pytest.raises(ProtocolError, match="too many"):
        lane.order.numbered(1, "a", refuse)
    with pytest.raises(ProtocolError, match="too many"):
        lane.order.unnumbered(refuse)
    lane.numbered(1, "c")
    lane.unnumbered("save")
    assert lane.sequence() == ["seq 1", "save"]
