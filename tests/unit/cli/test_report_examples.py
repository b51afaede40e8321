from __future__ import annotations

from instar.cli.report import _render_example  # pyright: ignore[reportPrivateUsage]
from tests.unit.store.factories import assistant, follow, ids, make_call, user


def test_a_session_is_told_from_its_question_on() -> None:
    """The question was the last thing before the first reply: what came before are examples."""
    first = make_call(
        messages=(user("1 + 1?"), assistant("2"), user("<40> + 2?")), reply=assistant("let me see")
    )
    second = follow(first, "c2", ids(9), user("= 42"), reply=assistant("42"))
    page = _render_example("after", [first, second], 1.0)
    told = [line.rpartition("</span>")[2] for line in page.split("</div>") if "<span class=role>" in line]
    assert told == ["&lt;40&gt; + 2?", "let me see", "= 42", "42"]


def test_of_a_session_that_was_summed_up_the_rest_is_told() -> None:
    first = make_call(messages=(user("a long story"),))
    summed_up = make_call("c2", messages=(user("in short: a story"),), reply=assistant("I see"))
    page = _render_example("after", [first, summed_up], 0.0)
    assert "a long story" not in page
    assert "in short: a story" in page
    assert "I see" in page
