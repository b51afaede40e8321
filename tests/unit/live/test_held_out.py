"""Tests of the choice of held-out prompts."""

from __future__ import annotations

from typing import Any

import pytest

from instar.live.base import HELD_OUT_SHARE, hash_prompt, is_held_out


def ask(text: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text, **fields}]


@pytest.mark.parametrize(
    "variant",
    [
        "sum  of\n\n1 and\t2",
        "SUM of 1 and 2",
        " Sum of 1 and 2 ",
        "Sum\\nof\\t1 and\\r\\n2",
        "Sum of １ and ２",
    ],
)
def test_prompts_that_differ_in_case_space_or_unicode_form_are_on_the_same_side(variant: str) -> None:
    assert hash_prompt(ask("Sum of 1 and 2")) == hash_prompt(ask(variant))


def test_ids_of_tool_calls_do_not_matter_but_arguments_and_roles_do() -> None:
    def call(id: str, arguments: str) -> list[dict[str, Any]]:
        return ask("", tool_calls=[{"id": id, "name": "add", "arguments": arguments}])

    assert hash_prompt(call("a", "{}")) == hash_prompt(call("b", "{}"))
    assert hash_prompt(call("a", "{}")) != hash_prompt(call("a", '{"x": 1}'))
    assert hash_prompt([{"role": "user", "content": "x"}]) != hash_prompt([{"role": "tool", "content": "x"}])
    assert hash_prompt(ask("a b")) != hash_prompt(ask("ab"))


def test_a_tenth_of_the_prompts_is_held_out() -> None:
    share = sum(is_held_out(ask(f"question {number}")) for number in range(5000)) / 5000
    assert share == pytest.approx(HELD_OUT_SHARE, abs=0.015)


def test_prompts_without_messages_or_with_lone_surrogates_can_be_hashed() -> None:
    assert not is_held_out([])
    assert len(hash_prompt(ask("\ud800"))) == 32
