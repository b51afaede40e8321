from __future__ import annotations

from instar.cli.report import ReportExample, render_example
from tests.unit.store.factories import assistant, ids, make_call, make_next_call, user


def test_example_starts_at_the_question() -> None:
    """The question is the last message before the first reply. Earlier messages are few-shot examples."""
    first = make_call(
        messages=(user("1 + 1?"), assistant("2"), user("<40> + 2?")), reply=assistant("let me see")
    )
    second = make_next_call(first, "c2", ids(9), user("= 42"), reply=assistant("42"))
    page = render_example(ReportExample("after", [first, second], 1.0))
    texts = [line.rpartition("</span>")[2] for line in page.split("</div>") if "<span class=role>" in line]
    assert texts == ["&lt;40&gt; + 2?", "let me see", "= 42", "42"]


def test_example_of_compacted_session_shows_the_last_prompt() -> None:
    first = make_call(messages=(user("a long conversation"),))
    summary = make_call("c2", messages=(user("in short: a story"),), reply=assistant("I see"))
    page = render_example(ReportExample("after", [first, summary], 0.0))
    assert "a long conversation" not in page
    assert "in short: a story" in page
    assert "I see" in page
