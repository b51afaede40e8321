from __future__ import annotations

import json

import pytest

from instar.demo.agent import calculate, prompt


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("24 * 310", "7440"),
        ("615 + 278", "893"),
        ("(3 + 4) * -2", "-14"),
        ("84 / 7", "12"),
        ("1 / 3", "0.3333"),
        ("1 / 0", "error"),
        ("2 ** 9999999", "error"),
        ("__import__('os').getcwd()", "error"),
        ("True + 1", "error"),
        ("1,000 + 1", "error"),
        ("apples + 1", "error"),
        ("", "error"),
        ("(" * 40, "error"),
        ("1" * 65, "error"),
    ],
)
def test_the_tool_does_arithmetic_and_nothing_else(expression: str, answer: str) -> None:
    assert calculate(json.dumps({"expression": expression})) == answer


@pytest.mark.parametrize("arguments", ["", "{", "[]", "3", "null", '{"expr": "1"}', '{"expression": 5}'])
def test_a_bad_call_gets_an_error(arguments: str) -> None:
    assert calculate(arguments) == "error"


def test_the_worked_examples_are_right() -> None:
    messages = prompt()
    assert [message["role"] for message in messages] == [
        "system",
        *["user", "assistant", "tool", "assistant"] * 2,
    ]
    for ask, tool in ((messages[2], messages[3]), (messages[6], messages[7])):
        (call,) = ask["tool_calls"]
        assert calculate(call["function"]["arguments"]) == tool["content"]
        assert tool["tool_call_id"] == call["id"]
