from __future__ import annotations

import json

import pytest

from instar.agents.calculator import calculate
from instar.demo.agent import EXAMPLES, make_prompt


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("24 * 310", "7440"),
        ("615 + 278", "893"),
        ("(3 + 4) * -2", "-14"),
        ("84 / 7", "12"),
        ("1 / 3", "0.3333"),
        ("0.00001", "0"),
        ("20 + 0.00001", "20"),
        ("1 / 0", "error"),
        ("2 ** 9999999", "error"),
        ("__import__('os').getcwd()", "error"),
        ("True + 1", "error"),
        ("1,000 + 1", "error"),
        ("apples + 1", "error"),
        ("", "error"),
        ("(" * 40, "error"),
        ("1" * 65, "error"),
        ("1e999", "error"),
        ("1e999 - 1e999", "error"),
    ],
)
def test_calculator_evaluates_only_arithmetic(expression: str, answer: str) -> None:
    assert calculate(json.dumps({"expression": expression})) == answer


@pytest.mark.parametrize(
    "arguments", ["", "{", "[]", "3", "null", '{"expr": "1"}', '{"expression": 5}', '{"expression": ["1"]}']
)
def test_calculator_returns_error_for_invalid_arguments(arguments: str) -> None:
    assert calculate(arguments) == "error"


def test_demo_examples_are_correct() -> None:
    system, *messages = make_prompt()
    assert system["role"] == "system"
    turns = [messages[start : start + 4] for start in range(0, len(messages), 4)]
    assert len(turns) == len(EXAMPLES)
    for turn in turns:
        assert [message["role"] for message in turn] == ["user", "assistant", "tool", "assistant"]
        (call,) = turn[1]["tool_calls"]
        assert calculate(call["function"]["arguments"]) == turn[2]["content"] == turn[3]["content"]
        assert turn[2]["tool_call_id"] == call["id"]
