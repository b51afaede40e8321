"""The Python clients under test, the variants in which each is run, and the expected answers."""

from __future__ import annotations

from dataclasses import dataclass

from tests.integration.clients.script import MALFORMED, WELCOME, compute_answer


@dataclass(frozen=True)
class Client:
    """A program in `programs/` and its variants, each mapped to the style of the model's replies."""

    name: str
    variants: dict[str, str]
    rewrites_replies: bool = False
    """True if the client modifies replies before it sends them back."""


SDK_VARIANTS = ("", "-stream", "-async", "-async-stream")
CLIENTS = [
    Client("openai", {f"chat{variant}": "stepwise" for variant in SDK_VARIANTS}),
    Client(
        "openai",
        {f"responses{variant}": "stepwise" for variant in (*SDK_VARIANTS, "-previous", "-previous-stream")},
    ),
    Client("openai", {f"completions{variant}": "plainly" for variant in SDK_VARIANTS}),
    Client("anthropic", {f"messages{variant}": "stepwise" for variant in SDK_VARIANTS}),
    Client(
        "openai_agents",
        {
            **{
                f"{dialect}{variant}": "stepwise"
                for dialect in ("chat", "responses")
                for variant in ("", "-stream")
            },
            "chat-handoff": "helped",
            "responses-handoff-stream": "helped",
        },
    ),
    Client(
        "pydantic_ai",
        {
            f"{dialect}{variant}": style
            for dialect in ("chat", "responses", "messages")
            for variant, style in (("", "stepwise"), ("-stream", "stepwise"), ("-typed", "typed"))
        },
    ),
    Client(
        "langgraph",
        {
            f"{dialect}{variant}": "stepwise"
            for dialect in ("chat", "responses", "messages")
            for variant in ("", "-stream", "-react")
        },
    ),
    Client("smolagents", {"chat": "finally", "chat-stream": "finally"}, rewrites_replies=True),
    Client("smolagents", {"chat-code": "coded", "chat-code-stream": "coded"}, rewrites_replies=True),
    Client(
        "mini_swe", {"chat": "bashed", "responses": "bashed", "messages": "bashed", "chat-text": "fenced"}
    ),
]
CALL_COUNTS = {"helped": 5, "bashed": 3, "fenced": 3, "plainly": 2, "badly": 2}
"""The number of calls in a conversation by style. Styles that are not listed take 4."""


def get_expected_answers(number: int, style: str) -> list[object]:
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
