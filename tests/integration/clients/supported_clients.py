"""The Python clients under test, the variants in which each is run, and the expected answers."""

from __future__ import annotations

from dataclasses import dataclass

from tests.integration.clients.script import MALFORMED, WELCOME, compute_answer


@dataclass(frozen=True)
class Client:
    """A program in `programs/` and its variants, each mapped to the style of the replies (see script.py)."""

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
    Client("openai", {f"completions{variant}": "plain" for variant in SDK_VARIANTS}),
    Client("anthropic", {f"messages{variant}": "stepwise" for variant in SDK_VARIANTS}),
    Client(
        "openai_agents",
        {
            **{
                f"{dialect}{variant}": "stepwise"
                for dialect in ("chat", "responses")
                for variant in ("", "-stream")
            },
            "chat-handoff": "handoff",
            "responses-handoff-stream": "handoff",
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
    Client("smolagents", {"chat": "final_answer", "chat-stream": "final_answer"}, rewrites_replies=True),
    Client("smolagents", {"chat-code": "code", "chat-code-stream": "code"}, rewrites_replies=True),
    Client("mini_swe", {"chat": "bash", "responses": "bash", "messages": "bash", "chat-text": "bash_block"}),
]
CALL_COUNTS = {"handoff": 5, "bash": 3, "bash_block": 3, "plain": 2, "malformed": 2}
"""The number of calls in a conversation by style. Other styles take 4 calls."""


def get_expected_answers(number: int, style: str) -> list[object]:
    total = compute_answer(number)
    match style:
        case "typed":
            return [total, total]
        case "bash" | "bash_block":
            return [f"calc says {total}"]
        case "final_answer":
            return [str(total), WELCOME]
        case "code":
            return [total, WELCOME]
        case "plain":
            return [f" It is {total}.", WELCOME]
        case "malformed":
            return [MALFORMED, WELCOME]
        case _:
            return [f"It is {total}.", WELCOME]
