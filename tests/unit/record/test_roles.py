"""Messages for templates that reject some sequences of roles."""

from __future__ import annotations

from instar.record.render import TemplateRenderer
from instar.types import Message, ToolCall
from tests.tiny import CHATML
from tests.unit.record.conftest import LoadTemplate
from tests.unit.record.conversations import CALC

ALTERNATING_TEMPLATE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}{% endfor %}" + CHATML
)
NATIVE_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' and m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "{% if m.role == 'user' and not loop.first and messages[loop.index0 - 1].role == 'tool' %}"
    "{{ raise_exception('After the tool comes the assistant') }}{% endif %}"
    "{% if m.tool_calls and m.tool_calls | length != 1 %}{{ raise_exception('single') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% if tools and loop.first %}{{ tools | tojson }}{% endif %}"
    "{% for call in m.tool_calls or [] %}"
    "{{ '<tool_call>' }}{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "{{ '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QUESTION = Message(role="user", content="What is 24 * 310?")
CALLS = [ToolCall(id=f"call-{i}", name="calc", arguments=f'{{"expression": "{i}"}}') for i in (1, 2)]
REPLY = Message(role="assistant", content="", tool_calls=CALLS)
RESULTS = [Message(role="tool", content=f"is {call['id']}", tool_call_id=call["id"]) for call in CALLS]


def render_text(renderer: TemplateRenderer, messages: list[Message]) -> str:
    return renderer._decode(renderer.render(messages, [CALC]))


def test_system_message_is_added_to_the_first_user_message(load_template: LoadTemplate) -> None:
    renderer = load_template(ALTERNATING_TEMPLATE)
    text = render_text(renderer, [Message(role="system", content="Be kind."), QUESTION])
    assert "<|im_start|>user\nBe kind.\nTools:\ncalc(" in text
    assert "\n\nWhat is 24 * 310?<|im_end|>" in text


def test_results_of_parallel_calls_are_one_user_message(load_template: LoadTemplate) -> None:
    renderer = load_template(ALTERNATING_TEMPLATE)
    prompt = renderer.render([QUESTION], [CALC])
    expected = (
        "<|im_start|>user\n<tool_response>is call-1</tool_response>\n\n"
        "<tool_response>is call-2</tool_response>\n\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    )
    more = Message(role="user", content="And now?")
    extended = renderer.extend(prompt, [5, renderer.stop_token_ids[0]], [*RESULTS, more], [CALC])
    assert extended is not None
    assert renderer._decode(extended).endswith(expected)
    assert render_text(renderer, [QUESTION, REPLY, *RESULTS, more]).endswith(expected)


def test_system_message_in_the_middle_becomes_a_user_message(load_template: LoadTemplate) -> None:
    renderer = load_template(ALTERNATING_TEMPLATE)
    late = Message(role="system", content="It is late.")
    answer = Message(role="assistant", content="Ok")
    text = render_text(renderer, [QUESTION, answer, QUESTION, late])
    assert "What is 24 * 310?\n\nIt is late.<|im_end|>" in text


def test_parallel_calls_are_split_and_ids_shortened(load_template: LoadTemplate) -> None:
    renderer = load_template(NATIVE_TEMPLATE)
    assert not renderer.uses_generic_tools
    more = Message(role="user", content="And now?")
    text = render_text(renderer, [QUESTION, REPLY, *RESULTS, more])
    first, second = text.index('"expression": "1"'), text.index('"expression": "2"')
    assert first < text.index("is call-1") < second < text.index("is call-2")
    assert "is call-2\n\nAnd now?<|im_end|>" in text


def test_template_that_accepts_all_roles_gets_unchanged_messages(tiny_renderer: TemplateRenderer) -> None:
    assert tiny_renderer._rules is None
