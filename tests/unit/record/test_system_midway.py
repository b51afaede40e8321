"""System messages in the middle of a conversation, which some agents send."""

from __future__ import annotations

from instar.record.render import TemplateRenderer
from instar.types import Message
from tests.tiny import CHATML
from tests.unit.record.conftest import LoadTemplate

HOISTING_TEMPLATE = (
    "{% for m in messages if m['role'] == 'system' %}"
    "{{ '<|im_start|>system\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
) + CHATML.replace("for message in messages", "for message in messages if message['role'] != 'system'")

FIRST_MESSAGES = [Message(role="system", content="Be kind."), Message(role="user", content="Hi")]
NEW_MESSAGES = [Message(role="user", content="And now?"), Message(role="system", content="It is late.")]


def test_system_message_after_a_reply_extends_the_prompt(renderer: TemplateRenderer) -> None:
    prompt = renderer.render(FIRST_MESSAGES)
    sampled = [*renderer.encode("Hello."), renderer.stop_token_ids[0]]
    extended = renderer.extend(prompt, sampled, NEW_MESSAGES)
    assert extended is not None
    assert extended[: len(prompt) + len(sampled)] == [*prompt, *sampled]
    assert extended == renderer.render(
        [*FIRST_MESSAGES, Message(role="assistant", content="Hello."), *NEW_MESSAGES]
    )


def test_template_that_moves_system_messages_to_the_top_is_not_extended(load_template: LoadTemplate) -> None:
    renderer = load_template(HOISTING_TEMPLATE)
    prompt = renderer.render(FIRST_MESSAGES)
    sampled = [*renderer.encode("Hello."), renderer.stop_token_ids[0]]
    assert renderer.extend(prompt, sampled, NEW_MESSAGES[:1]) is not None
    assert renderer.extend(prompt, sampled, NEW_MESSAGES) is None
