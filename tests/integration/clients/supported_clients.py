"""The Python clients that are tested, in which ways each is asked, and what it then answers."""

from __future__ import annotations

from dataclasses import dataclass

from tests.integration.clients.script import MALFORMED, WELCOME, compute_answer


@dataclass(frozen=True)
class Client:
    """A program of `programs/`, and its ways: how each is asked, and how it is to be answered."""

    name: str
    variants: dict[str, str]
    rewrites_replies: bool = False
    """Whether it sends the replies back in words of its own."""


SDK_VARIANTS = ("", "-stream", "-async", "-async-stream")
CLIENTS = [
    Client("openai", {f"chat{way}": "stepwise" for way in SDK_VARIANTS}),
    Client(
        "openai", {f"responses{way}": "stepwise" for way in (*SDK_VARIANTS, "-previous", "-previous-stream")}
    ),
    Client("openai", {f"completions{way}": "plainly" for way in SDK_VARIANTS}),
    Client("anthropic", {f"messages{way}": "stepwise" for way in SDK_VARIANTS}),
    Client(
        "openai_agents",
        {
            **{f"{dialect}{way}": "stepwise" for dialect in ("chat", "responses") for way in ("", "-stream")},
            "chat-handoff": "helped",
            "responses-handoff-stream": "helped",
        },
    ),
    Client(
        "pydantic_ai",
        {
            f"{dialect}{way}": how
            for dialect in ("chat", "responses", "messages")
            for way, how in (("", "stepwise"), ("-stream", "stepwise"), ("-typed", "typed"))
        },
    ),
    Client(
        "langgraph",
        {
            f"{dialect}{way}": "stepwise"
            for dialect in ("chat", "responses", "messages")
            for way in ("", "-stream", "-react")
        },
    ),
    Client("smolagents", {"chat": "finally", "chat-stream": "finally"}, rewrites_replies=True),
    Client("smolagents", {"chat-code": "coded", "chat-code-stream": "coded"}, rewrites_replies=True),
    Client(
        "mini_swe", {"chat": "bashed", "responses": "bashed", "messages": "bashed", "chat-text": "fenced"}
    ),
]
CALL_COUNTS = {"helped": 5, "bashed": 3, "fenced": 3, "plainly": 2, "badly": 2}
"""How many a conversation takes; the others take 4."""


def expected_answers(number: int, style: str) -> list[object]:
    total = compute_answer(number)
    match style:
        case "typed":
            return [total, total]
        case "bashed" | "fenced":
            return [f"calc says {total}"]
        case "finally":
            return [str(total), WELCOME]
        case "coded":
            return [total, WELCOME]
        case "plainly":
            return [f" It is {total}.", WELCOME]
        case "badly":
            return [MALFORMED, WELCOME]
        case _:
            return [f"It is {total}.", WELCOME]
