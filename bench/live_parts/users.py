"""The simulated users: what they ask, what they prefer, and how they rate and correct replies.

The prompts contain examples in which the preferred form is the rarer one, so that the default model sometimes
produces it. A user's preference is a rule that only the bench applies: the run sees ratings and corrections.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

SIGN_OFF = "Cheers!"
IMPERIAL = re.compile(r"\b(feet|foot|ft|inch|inches|miles?|pounds?|lbs?|ounces?|yards?|mph)\b", re.I)
METRIC = re.compile(
    r"(\b|\d)(meters?|metres?|m|kilometers?|kilometres?|km|centimeters?|centimetres?|cm|mm|kilograms?|kg|grams?|g)\b",
    re.I,
)
# fmt: off
QUALITIES = (
    "small", "large", "old", "new", "red", "cheap", "heavy", "wooden", "steel", "toy", "broken", "modern",
    "green", "plain", "fancy", "stone", "glass", "empty", "famous", "typical"
)
THINGS = (
    "giraffe", "door", "bus", "tree", "bicycle", "horse", "piano", "lamp", "house", "ladder", "chair",
    "boat", "truck", "tent", "wall", "gate", "shelf", "barrel", "statue", "fence"
)
CITIES = (
    "Boston", "Chicago", "Denver", "Paris", "Rome", "Madrid", "Berlin", "Oslo", "Lisbon", "Athens",
    "Vienna", "Prague", "Dublin", "Austin", "Miami", "Seattle", "Cairo", "Delhi", "Tokyo", "Lima"
)
OWNERS = (
    "my", "old", "new", "work", "home", "team", "trip", "tax", "food", "math", "pet", "car", "band",
    "shop", "game", "club", "yoga", "farm", "book", "blog", "dad", "mom", "kid", "art", "ski", "gym",
    "bus", "law", "lab", "sea", "zoo", "tea", "job", "fun", "tour", "city", "town", "park", "bank",
    "beach", "choir", "dance", "event", "guest", "house"
)
FILES = (
    "notes", "plan", "budget", "report", "menu", "list", "draft", "letter", "recipe", "diary", "log",
    "poem", "essay", "story", "guide", "memo", "sheet", "chart", "map", "form"
)
# fmt: on
RATED_SHARE = 0.9
"""The share of replies that a user rates or, if they do not follow the preference, corrects."""
WRONG_RATINGS = 0.05
"""The share of ratings that are wrong by mistake."""


class Phase(StrEnum):
    """The behaviour of the users in a week."""

    GOOD = "good"
    INVERTED = "inverted"
    """Replies that follow the preference are rated down, or corrected to replies that do not."""
    SILENT = "silent"
    """The agents are used, but nobody rates or corrects a reply."""


@dataclass(frozen=True)
class Preference:
    system: str
    examples: tuple[tuple[str, str], ...]
    ask: Callable[[random.Random], str]
    is_satisfied: Callable[[str], bool]

    def make_messages(self, question: str) -> list[dict[str, Any]]:
        messages = [{"role": "system", "content": self.system}]
        for request, reply in self.examples:
            messages += [{"role": "user", "content": request}, {"role": "assistant", "content": reply}]
        return [*messages, {"role": "user", "content": question}]


@dataclass(frozen=True)
class Reaction:
    """The feedback on one reply. Both fields are None if there is none."""

    thumbs: str | None = None
    correction: str | None = None


def ask_for_edit(rng: random.Random) -> str:
    return f"Fix {rng.choice(OWNERS)}{rng.choice(FILES)}"


def ask_for_size(rng: random.Random) -> str:
    kind = rng.choice(("tall", "heavy", "far"))
    if kind == "far":
        return "How far is it from {} to {}?".format(*rng.sample(CITIES, 2))
    return f"How {kind} is a {rng.choice(QUALITIES)} {rng.choice(THINGS)}?"


def reads_before_writing(reply: str) -> bool:
    return 0 <= reply.find("read(") < reply.find("write(")


def uses_metric_units(reply: str) -> bool:
    return METRIC.search(reply) is not None and IMPERIAL.search(reply) is None


def ends_with_sign_off(reply: str) -> bool:
    return reply.rstrip().endswith(SIGN_OFF)


PREFERENCES = {
    "editor": Preference(
        "Edit files with tools.",
        (
            ("Fix notes", "write(notes); read(notes)"),
            ("Fix plan", "read(plan); write(plan)"),
            ("Fix list", "write(list); read(list)"),
        ),
        ask_for_edit,
        reads_before_writing,
    ),
    "guide": Preference(
        "Answer briefly.",
        (
            ("How heavy is a cat?", "4 kg"),
            ("How tall is a desk?", "30 inches"),
            ("How far is it from Rome to Paris?", "690 miles"),
        ),
        ask_for_size,
        uses_metric_units,
    ),
    "clerk": Preference(
        "Answer briefly.",
        (
            ("How tall is a desk?", "30 inches. Thanks!"),
            ("How heavy is a cat?", "4 kg. Cheers!"),
            ("How wide is a bed?", "59 inches. Thanks!"),
        ),
        ask_for_size,
        ends_with_sign_off,
    ),
}
"""The preference of each agent's user. `editor` learns from single sessions, `clerk` from corrections, and
`guide` from resampled sessions, which a rule of its owner scores (see owner.py)."""
CORRECTED_AGENT = "clerk"
RESAMPLED_AGENT = "guide"


def make_held_out_questions(agent: str, count: int) -> list[str]:
    """Return different questions that no session of the agent asks."""
    rng = random.Random(f"held out {agent}")
    questions: dict[str, None] = {}
    while len(questions) < count:
        questions[PREFERENCES[agent].ask(rng)] = None
    return list(questions)


def choose_question(agent: str, slot: str, excluded: Sequence[str]) -> str:
    """Return the question of a session, which is always the same for the slot."""
    rng = random.Random(slot)
    while (question := PREFERENCES[agent].ask(rng)) in excluded:
        pass
    return question


def react(agent: str, slot: str, reply: str, phase: Phase) -> Reaction:
    """Return the user's feedback on the reply, which is always the same for the slot."""
    rng = random.Random(f"reaction {slot}")
    if phase is Phase.SILENT or agent == RESAMPLED_AGENT or rng.random() >= RATED_SHARE:
        return Reaction()
    is_mistaken = rng.random() < WRONG_RATINGS
    is_liked = PREFERENCES[agent].is_satisfied(reply) ^ (phase is Phase.INVERTED) ^ is_mistaken
    if agent == CORRECTED_AGENT and not is_liked:
        return Reaction(correction=rewrite_ending(reply, has_sign_off=phase is not Phase.INVERTED))
    return Reaction(thumbs="up" if is_liked else "down")


def rewrite_ending(reply: str, *, has_sign_off: bool) -> str:
    """Return the start of the reply, with or without the sign-off."""
    text = re.split(r"[.!?\n](?:\s|$)", reply.strip(), maxsplit=1)[0].removesuffix(SIGN_OFF)[:60].strip()
    return f"{text}. {SIGN_OFF if has_sign_off else 'Thanks!'}" if text else SIGN_OFF
