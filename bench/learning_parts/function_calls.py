"""Requests to a library and a shop that must be answered with one call of one of six functions.

The prompt lists all functions and shows calls of four of them. A call is identified by its function and its
arguments, and a hash of it determines whether it is held out, so that the training set and the held-out set
never share a call.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from itertools import cycle, islice
from random import Random
from typing import TYPE_CHECKING, Any

from instar.agents.openai_agent import make_tool_call, make_tool_result

if TYPE_CHECKING:
    from instar.rewards.base import Transcript
    from instar.types import Json

HELD_OUT_DIVISOR = 5
"""One in this many calls is held out."""
ITEMS = (
    *("chairs", "lamps", "mugs", "towels", "pillows", "candles"),
    *("baskets", "plates", "vases", "rugs", "clocks", "mirrors"),
)
AUTHORS = (
    *("Austen", "Borges", "Camus", "Dante", "Eliot", "Faulkner", "Goethe", "Homer", "Ibsen", "Joyce"),
    *("Kafka", "Lorca", "Milton", "Neruda", "Orwell", "Proust", "Rilke", "Swift", "Tolstoy", "Woolf"),
)
BRANCHES = (
    *("abbey", "airport", "arcade", "bridge", "campus", "castle", "chapel", "depot", "harbor", "hospital"),
    *("market", "mill", "museum", "plaza", "square", "stadium", "station", "theatre", "tower", "village"),
)
ROOMS = ("atrium", "gallery", "lounge", "auditorium", "archive", "terrace", "salon", "annex", "loft", "foyer")

Arguments = dict[str, str | int]
FUNCTIONS: dict[str, dict[str, str]] = {
    "shelve_author": {"author": "string", "shelf": "integer"},
    "extend_loan": {"card": "integer", "weeks": "integer"},
    "set_price": {"item": "string", "cents": "integer"},
    "order_item": {"item": "string", "count": "integer"},
    "ship_parcels": {"origin": "string", "destination": "string", "parcels": "integer"},
    "reserve_room": {"room": "string", "guests": "integer"},
}
"""The parameters of each function and their JSON types."""
PHRASINGS: dict[str, tuple[str, ...]] = {
    "shelve_author": ("Put the novels by {author} on shelf {shelf}.", "Shelf {shelf} is now for {author}."),
    "extend_loan": (
        "Extend the loan of card {card} by {weeks} weeks.",
        "My card is {card} and I would like to keep everything for {weeks} more weeks.",
    ),
    "set_price": ("The {item} should cost {cents} cents.", "Sell the {item} for {cents} cents from now on."),
    "order_item": ("Order {count} {item}.", "The shop is out of {item}. Please get {count} new ones."),
    "ship_parcels": (
        "Ship {parcels} parcels from the {origin} to the {destination}.",
        "The {destination} is waiting for {parcels} parcels that are still at the {origin}.",
    ),
    "reserve_room": (
        "Reserve the {room} for {guests} guests.",
        "We expect {guests} guests in the {room}.",
    ),
}
EXAMPLES: tuple[tuple[str, str, Arguments], ...] = (
    ("Put the novels by Zola on shelf 3.", "shelve_author", {"author": "Zola", "shelf": 3}),
    ("Extend the loan of card 72 by 4 weeks.", "extend_loan", {"card": 72, "weeks": 4}),
    ("The bowls should cost 250 cents.", "set_price", {"item": "bowls", "cents": 250}),
    (
        "Ship 2 parcels from the brewery to the court.",
        "ship_parcels",
        {"origin": "brewery", "destination": "court", "parcels": 2},
    ),
)
_DRAW: dict[str, Callable[[Random], Any]] = {
    "author": lambda rng: rng.choice(AUTHORS),
    "item": lambda rng: rng.choice(ITEMS),
    "origin": lambda rng: rng.choice(BRANCHES),
    "destination": lambda rng: rng.choice(BRANCHES),
    "room": lambda rng: rng.choice(ROOMS),
    "shelf": lambda rng: rng.randint(2, 60),
    "card": lambda rng: rng.randint(100, 999),
    "weeks": lambda rng: rng.randint(2, 9),
    "cents": lambda rng: rng.randint(5, 900),
    "count": lambda rng: rng.randint(2, 90),
    "parcels": lambda rng: rng.randint(3, 99),
    "guests": lambda rng: rng.randint(2, 99),
}
"""How the value of each parameter is drawn, by the parameter's name."""


def make_tasks(size: int, *, held_out: bool, seed: int = 0) -> list[Json]:
    """Return tasks with distinct calls, rotating through the functions."""
    rng = Random(f"function-calls/{seed}/{held_out}")
    tasks: dict[str, Json] = {}
    for name in islice(cycle(FUNCTIONS), size):
        while True:
            arguments = _draw_arguments(rng, name)
            key = json.dumps([name, arguments])
            if _is_held_out(key) is held_out and key not in tasks:
                break
        question = rng.choice(PHRASINGS[name]).format(**arguments)
        tasks[key] = {
            "messages": [*_make_prompt(), {"role": "user", "content": question}],
            "tools": [_make_tool(tool) for tool in FUNCTIONS],
            "name": name,
            "arguments": arguments,
        }
    return list(tasks.values())


def score(task: Json, transcript: Transcript) -> float:
    """Return 0 unless the final reply is exactly one call of the expected function. The score of such a call
    is the share of correct parts, which are the function's name and each argument; an unknown argument counts
    as a wrong part."""
    calls = (transcript.final or {}).get("tool_calls", [])
    if len(calls) != 1 or calls[0]["name"] != task["name"]:
        return 0.0
    try:
        arguments = json.loads(calls[0]["arguments"])
    except ValueError:
        return 0.0
    expected: Arguments = task["arguments"]
    correct = sum(_is_equal(arguments.get(name), value) for name, value in expected.items())
    return (1 + correct) / (1 + len(expected.keys() | arguments.keys()))


def _is_equal(value: Any, expected: str | int) -> bool:
    """True if type and value are equal, because 1, 1.0, true and "1" are different answers."""
    return type(value) is type(expected) and value == expected


def _draw_arguments(rng: Random, name: str) -> Arguments:
    return {parameter: _DRAW[parameter](rng) for parameter in FUNCTIONS[name]}


def _is_held_out(key: str) -> bool:
    return zlib.crc32(key.encode()) % HELD_OUT_DIVISOR == 0


def _make_prompt() -> list[Json]:
    messages: list[Json] = [{"role": "system", "content": "Answer with one call of a tool."}]
    for number, (question, name, arguments) in enumerate(EXAMPLES):
        messages += [
            {"role": "user", "content": question},
            make_tool_call(f"call_{number}", name, **arguments),  # pyright: ignore[reportArgumentType]
            make_tool_result(f"call_{number}", "done"),
        ]
    return messages


def _make_tool(name: str) -> Json:
    properties = {parameter: {"type": type_name} for parameter, type_name in FUNCTIONS[name].items()}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}
