"""The models' own formats of tool calls and reasoning: parsed in pieces, and detected from the template."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import AddedToken

from instar.record.base import ReplyDelta
from instar.record.render import TemplateRenderer
from instar.record.stream import ReplyScanner, build_reply
from instar.record.tool_formats import REASONING_FORMATS, TOOL_FORMATS
from instar.types import Message, Tool
from tests.tiny import make_tiny_tokenizer
from tests.unit.record.conversations import collect_calls

SEARCH = Tool(
    name="search",
    description="",
    parameters={"type": "object", "properties": {"q": {"type": "string"}, "n": {"type": "integer"}}},
)
HARMONY = REASONING_FORMATS[0]
ARGUMENTS = '{"q":"é \\u00e9 🙂 \\"</x>\\"", "n":2}'
VALUE = 'é é 🙂 "</x>"'
CALL = f'{{"name": "search", "arguments": {ARGUMENTS}}}'
XML = (
    f"\n<function=search>\n<parameter=q>\n{VALUE}\n</parameter>\n"
    "<parameter=n>\n2\n</parameter>\n</function>\n"
)
REPLIES = {
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>",
    "qwen-xml": f"<tool_call>{XML}</tool_call>\n<tool_call>{XML}</tool_call>",
    "seed": f"<seed:tool_call>{XML}</seed:tool_call><seed:tool_call>{XML}</seed:tool_call>",
    "glm": f"<tool_call>search\n<arg_key>q</arg_key>\n<arg_value>{VALUE}</arg_value>\n<arg_key>n</arg_key>\n"
    f"<arg_value>2</arg_value>\n</tool_call><tool_call>search<arg_key>q</arg_key><arg_value>{VALUE}</arg_value>"
    "<arg_key>n</arg_key><arg_value>2</arg_value></tool_call>",
    "minimax": "<minimax:tool_call>\n"
    + (
        f'<invoke name="search">\n<parameter name="q">{VALUE}</parameter>\n'
        '<parameter name="n">2</parameter>\n</invoke>\n'
    )
    * 2
    + "</minimax:tool_call>",
    "kimi": "<|tool_calls_section_begin|>"
    + "".join(
        f"<|tool_call_begin|>functions.search:{i}<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
        for i in range(2)
    )
    + "<|tool_calls_section_end|>",
    "deepseek-v3": "<｜tool▁calls▁begin｜>"
    + f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>\n" * 2
    + "<｜tool▁calls▁end｜>",
    "deepseek-v3.1": "<｜tool▁calls▁begin｜>"
    + f"<｜tool▁call▁begin｜>search<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>" * 2
    + "<｜tool▁calls▁end｜>",
    "mistral-args": f"[TOOL_CALLS]search[CALL_ID]abcdefghi[ARGS]{ARGUMENTS}"
    f"[TOOL_CALLS]search[ARGS]{ARGUMENTS}",
    "mistral-json": f"[TOOL_CALLS][{CALL}, {CALL}]",
    "gemma": f'<|tool_call>call:search{{q:<|"|>{VALUE}<|"|>,n:2}}<tool_call|>' * 2,
    "phi": f"<|tool_call|>[{CALL},{CALL}]<|/tool_call|>",
    "granite": f"<|tool_call|>[{CALL}, {CALL}]",
    "nemotron": f"<TOOLCALL>[{CALL}, {CALL}]</TOOLCALL>",
    "tool-calls": f"<tool_calls>\n{CALL}\n{CALL}\n</tool_calls>",
    "command-r": '<|START_ACTION|>[\n{"tool_call_id": "0", '
    f'"tool_name": "search", "parameters": {ARGUMENTS}}},\n'
    f'{{"tool_name": "search", "parameters": {ARGUMENTS}}}\n]<|END_ACTION|>',
    "apertus": f'<|tools_prefix|>[{{"search": {ARGUMENTS}}}, {{"search": {ARGUMENTS}}}]<|tools_suffix|>',
    "lfm": f"<|tool_call_start|>[search(q={VALUE!r}, n=2), search(q={VALUE!r}, n=2)]<|tool_call_end|>",
    "olmo": f"<function_calls>\nsearch(q={VALUE!r}, n=2)\nsearch(q={VALUE!r}, n=2)\n</function_calls>",
    "llama": "; ".join([CALL.replace("arguments", "parameters")] * 2),
}
FORMATS = {known.name: known for known in TOOL_FORMATS}


def scan(scanner: ReplyScanner, text: str, rng: random.Random) -> tuple[Message, list[ReplyDelta]]:
    """Feed the text in random pieces and check that the deltas add up to the reply."""
    deltas: list[ReplyDelta] = []
    while text:
        size = rng.randint(1, 7)
        deltas += scanner.feed(text[:size])
        text = text[size:]
    deltas += scanner.finish()
    message = build_reply("".join(scanner.content), "".join(scanner.reasoning), scanner.tool_calls)
    assert "".join(delta.text for delta in deltas) == message["content"]
    assert collect_calls(deltas) == message.get("tool_calls", [])
    return message, deltas


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", REPLIES)
def test_tool_format_two_calls_are_parsed_in_pieces(name: str, eager: bool) -> None:
    rng = random.Random(name)
    before = "" if name == "llama" else "Let me see.\n\n"
    for _ in range(20):
        scanner = ReplyScanner(tool_format=FORMATS[name], tools=[SEARCH], eager=eager)
        reply = f"<think>\nHm <x>\n</think>\n\n{before}{REPLIES[name]}"
        message, _ = scan(scanner, reply, rng)
        calls = message.get("tool_calls", [])
        assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
            ("search", {"q": VALUE, "n": 2})
        ] * 2
        assert len({call["id"] for call in calls}) == 2
        assert message["content"] == before.strip()
        assert message.get("reasoning", "").strip() == "Hm <x>"


@pytest.mark.parametrize("name", [name for name in REPLIES if name != "llama"])
def test_tool_format_malformed_call_is_text(name: str) -> None:
    known = FORMATS[name]
    reply = f"Hi. {known.begin} oops({known.end}"
    message, _ = scan(ReplyScanner(tool_format=known, tools=[SEARCH]), reply, random.Random(name))
    assert "tool_calls" not in message
    assert message["content"] == reply


def test_tool_format_llama_json_that_is_not_a_call_is_text() -> None:
    for reply in ('{"a": 1}', "{x}", "[1, 2]", "a {"):
        scanner = ReplyScanner(tool_format=FORMATS["llama"], tools=[SEARCH])
        assert scan(scanner, reply, random.Random(1))[0]["content"] == reply


def test_tool_format_values_follow_the_schema() -> None:
    values = "<parameter=q>2</parameter><parameter=n>2</parameter>"
    text = f"<tool_call><function=search>{values}</function></tool_call>"
    scanner = ReplyScanner(tool_format=FORMATS["qwen-xml"], tools=[SEARCH])
    (call,) = scan(scanner, text, random.Random(1))[0].get("tool_calls", [])
    assert json.loads(call["arguments"]) == {"q": "2", "n": 2}


@pytest.mark.parametrize("tools", [[], [SEARCH]])
def test_harmony_reply_is_split_into_channels(tools: list[Tool]) -> None:
    reply = (
        "<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I search.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is 2."
    )
    for seed in range(20):
        harmony = FORMATS["harmony"] if tools else None
        scanner = ReplyScanner(tool_format=harmony, tools=tools, reasoning_format=HARMONY)
        message, _ = scan(scanner, reply, random.Random(seed))
        assert (message.get("reasoning"), message["content"]) == ("Hm.", "I search.It is 2.")


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.search <|constrain|>json<|message|>",
        " to=functions.search<|channel|>commentary json<|message|>",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.search<|message|>",
    ],
)
def test_harmony_call_is_parsed_and_streamed(header: str) -> None:
    scanner = ReplyScanner(
        tool_format=FORMATS["harmony"], tools=[SEARCH], reasoning_format=HARMONY, eager=True
    )
    message, deltas = scan(scanner, header + ARGUMENTS, random.Random(1))
    (call,) = message.get("tool_calls", [])
    assert (call["name"], call["arguments"], message["content"]) == ("search", ARGUMENTS, "")
    assert sum(delta.call is not None for delta in deltas) > 2


HARMONY_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}"
    "{{ '<|start|>assistant to=functions.' + m.tool_calls[0].function.name }}"
    "{{ '<|channel|>commentary json<|message|>' }}"
    "{{ m.tool_calls[0].function.arguments | tojson + '<|call|>' }}"
    "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}{{ '<|start|>functions.' + m.name + ' to=assistant<|message|>' }}"
    "{{ m.content + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content }}"
    "{% if tools and loop.first %}{{ tools | tojson }}{% endif %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{# <|channel|>analysis<|message|> #}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)


def make_harmony_renderer() -> TemplateRenderer:
    tokenizer = make_tiny_tokenizer(template=HARMONY_TEMPLATE)
    names = ("start", "end", "message", "channel", "call", "return", "constrain")
    tokenizer.add_tokens([AddedToken(f"<|{name}|>", special=True) for name in names])
    tokenizer.eos_token = "<|return|>"
    return TemplateRenderer(tokenizer)


def test_harmony_reply_ends_after_a_call_or_the_final_message() -> None:
    renderer = make_harmony_renderer()
    assert renderer.tool_format.name == "harmony"
    assert {renderer.decode_token(i) for i in renderer.stop_token_ids} == {"<|call|>", "<|return|>"}


def test_harmony_result_names_the_tool_of_the_reply() -> None:
    renderer = make_harmony_renderer()
    question = Message(role="user", content="What is it?")
    prompt = renderer.render([question], [SEARCH])
    text = f"<|channel|>commentary to=functions.search <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
    sampled = renderer.encode(text)
    reply = renderer.parse(sampled, [SEARCH], (), prompt)
    (call,) = reply.get("tool_calls", [])
    result = Message(role="tool", content="2", tool_call_id=call["id"])
    extended = renderer.extend(prompt, sampled, [result], [SEARCH], reply)
    assert extended is not None
    added = renderer._decode(extended[len(prompt) + len(sampled) :])
    assert added == "<|start|>functions.search to=assistant<|message|>2<|end|><|start|>assistant"
