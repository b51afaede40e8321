"""Rendering of prompts with the model's chat template, and extension of prompts by new messages."""

from __future__ import annotations

import random
import re

import pytest

from instar.errors import ConfigError
from instar.record.render import TemplateRenderer
from instar.types import Message
from tests.tiny import CHATML
from tests.unit.record.conftest import LoadTemplate
from tests.unit.record.conversations import CALC, make_follow_up, make_reply_text, make_words

QUESTION = Message(role="user", content="What is 24 * 310?")

HERMES_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\nTools: ' }}{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' }}{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "{{ '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Formats the last message differently from earlier ones, like templates that drop old reasoning.
REFORMATTING_TEMPLATE = CHATML.replace(
    "+ message['content'] +", "+ ('' if loop.last else '~') + message['content'] +"
)
NUMBERING_TEMPLATE = CHATML.replace("'<|im_start|>' +", "'<|im_start|>' + (loop.index | string) +")
USER_ASSISTANT_TEMPLATE = (
    "{% for message in messages %}{% if message.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}" + CHATML
)


def test_extended_prompts_match_rendered_prompts_in_random_sessions(renderer: TemplateRenderer) -> None:
    rng = random.Random(1)
    for _ in range(40):
        messages = [Message(role="system", content=make_words(rng))] if rng.random() < 0.5 else []
        messages.append(Message(role="user", content=make_words(rng)))
        tools = [CALC] if rng.random() < 0.8 else []
        prompt = renderer.render(messages, tools)
        canonical = True
        for _ in range(rng.randint(1, 4)):
            text = make_reply_text(rng)
            sampled = renderer.encode(text)
            ended = rng.random() < 0.7
            if ended:
                sampled.append(renderer.stop_token_ids[0])
            reply = renderer.parse(sampled, tools)
            new = make_follow_up(rng, reply)
            extended = renderer.extend(prompt, sampled, new, tools)
            assert extended is not None
            assert extended[: len(prompt) + len(sampled)] == [*prompt, *sampled]
            messages += [Message(role="assistant", content=text), *new]
            expected = renderer.render(messages, tools)
            assert renderer._decode(extended) == renderer._decode(expected)
            # Leading whitespace of a sampled reply is a separate token; encoding the whole text merges it.
            canonical = canonical and not text[:1].isspace()
            if canonical:
                assert extended == expected
            prompt = extended


def test_truncated_reply_is_closed_by_unsampled_tokens(renderer: TemplateRenderer) -> None:
    prompt = renderer.render([QUESTION])
    sampled = renderer.encode("It is")
    new = [Message(role="user", content="Go on")]
    truncated = renderer.extend(prompt, sampled, new)
    ended = renderer.extend(prompt, [*sampled, renderer.stop_token_ids[0]], new)
    assert truncated is not None
    assert truncated == ended


def test_generic_tool_list_is_a_system_message(renderer: TemplateRenderer) -> None:
    text = renderer._decode(renderer.render([QUESTION], [CALC]))
    assert (
        "<|im_start|>system\nTools:\n"
        "calc(expression: string, digits?: integer): Evaluate arithmetic.\n"
        'To call a tool, write <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\n' in text
    )
    assert renderer.uses_generic_tools


def test_template_with_tools_is_used_for_calls(load_template: LoadTemplate) -> None:
    renderer = load_template(HERMES_TEMPLATE)
    assert not renderer.uses_generic_tools
    assert renderer.bridged_roles == {"user", "tool", "system"}
    sampled = renderer.encode('<tool_call>{"name":"calc","arguments":{"expression":"1"}}</tool_call>')
    sampled.append(renderer.stop_token_ids[0])
    prompt = renderer.render([QUESTION], [CALC])
    reply = renderer.parse(sampled, [CALC])
    new = make_follow_up(random.Random(0), reply)
    extended = renderer.extend(prompt, sampled, new, [CALC])
    assert extended is not None
    rendered = renderer.render([QUESTION, reply, *new], [CALC])
    assert extended[len(prompt) + len(sampled) :] == rendered[-(len(extended) - len(prompt) - len(sampled)) :]


def test_tool_format_generic_overrides_the_template(load_template: LoadTemplate) -> None:
    assert load_template(HERMES_TEMPLATE, "generic").uses_generic_tools


def test_tool_format_template_is_rejected_without_tools_in_the_template(load_template: LoadTemplate) -> None:
    with pytest.raises(ConfigError, match=re.escape("model.tool_format")):
        load_template(CHATML, "template")


@pytest.mark.parametrize("template", [REFORMATTING_TEMPLATE, NUMBERING_TEMPLATE])
def test_unstable_template_is_not_bridged(load_template: LoadTemplate, template: str) -> None:
    renderer = load_template(template)
    assert renderer.bridged_roles == frozenset()
    prompt = renderer.render([QUESTION])
    assert renderer.extend(prompt, [5, 6], [Message(role="user", content="x")]) is None


def test_template_without_the_tool_role_gets_results_as_user_messages(load_template: LoadTemplate) -> None:
    renderer = load_template(USER_ASSISTANT_TEMPLATE)
    prompt = renderer.render([QUESTION])
    extended = renderer.extend(prompt, [5, 6], [Message(role="tool", content="7440")], [CALC])
    assert extended is not None
    assert "<|im_start|>user\n<tool_response>7440</tool_response>" in renderer._decode(extended)
    text = renderer._decode(renderer.render([Message(role="system", content="Be kind."), QUESTION]))
    assert "<|im_start|>user\nBe kind.\n\nWhat is 24 * 310?<|im_end|>" in text


def test_new_assistant_messages_are_not_bridged(tiny_renderer: TemplateRenderer) -> None:
    prompt = tiny_renderer.render([QUESTION])
    new = [QUESTION, Message(role="assistant", content="A reply that was not sampled"), QUESTION]
    assert tiny_renderer.extend(prompt, [5, 6], new) is None
    assert tiny_renderer.extend(prompt, [5, 6], []) is None
