"""The formats in which models write tool calls and reasoning.

A format is a row of a table: the texts that begin and end a call, and a function that parses the text between
them. `TemplateRenderer` chooses the format with which the calls that a chat template renders are parsed back.
Most formats are JSON with a name and arguments, JSON after a name, or tags around each argument.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from instar.record.base import Tools
from instar.record.call_parsers import (
    GEMMA_QUOTE,
    parse_gemma,
    parse_json,
    parse_json_by_name,
    parse_named,
    parse_python,
    parse_tags,
    write_list,
    write_python,
    write_tagged,
)
from instar.record.tool_calls import CALL_CLOSE, CALL_HEAD, CALL_OPEN
from instar.types import ToolCall

ParseCalls = Callable[[str, Tools], list[ToolCall]]
"""A function that parses the text of one or more calls. Raises ValueError if the text is invalid."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    name: str
    begin: str
    """The text that begins a call, or a list of calls. If it is empty, a reply that is JSON is a call."""
    end: str
    """The text that ends it. If it is empty, the call ends with the reply, or where another one begins."""
    parse: ParseCalls
    wrappers: tuple[str, ...] = ()
    """Texts around calls that are not part of the reply's content."""
    inner: tuple[str, ...] = ()
    """Texts within a call that a tokenizer may encode as special tokens."""
    head: re.Pattern[str] | None = None
    """Matches a call up to its arguments, if these are a JSON object at the end of the call. The groups are
    `name`, as text or in quotes, and optionally `id`."""
    write: Callable[[Sequence[ToolCall]], str] | None = None
    """Writes calls, for chat templates that list tools but do not render calls."""

    frame: tuple[str, str, str] | None = None
    """The texts before the quoted name, between it and the JSON arguments, and after these, if every call can
    be written like this."""
    separator: str | None = None
    """The text between two calls, or None if a reply that is written with ``frame`` has only one."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, self.end, *self.wrappers, *self.inner)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    begin: str
    end: str
    frames: tuple[str, ...] = ()
    """Texts in a reply that are neither reasoning nor content. With frames, reasoning may begin anywhere."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, self.end, *self.frames)


def _named(name: str, begin: str, end: str, pattern: str, **options: Any) -> ToolFormat:
    compiled = re.compile(pattern)
    head = re.compile(pattern + r"(?=\{)")
    return ToolFormat(name, begin, end, partial(parse_named, compiled), head=head, **options)


def _tags(name: str, begin: str, end: str, call: str, parameter: str, **options: Any) -> ToolFormat:
    parse = partial(parse_tags, re.compile(call, re.DOTALL), re.compile(parameter, re.DOTALL))
    return ToolFormat(name, begin, end, parse, **options)


_XML_CALL = r"<function=(?P<name>[^>\n]+)>(?P<parameters>.*?)</function>"
_XML_PARAMETER = r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
_NAMED_PARAMETER = r'<parameter name="(?P<key>[^"]+)">(?P<value>.*?)</parameter>'
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DSML_PARAMETER = (
    r'<｜DSML｜parameter name="(?P<key>[^"]+)" string="(?P<string>true|false)">'
    r"(?P<value>.*?)</｜DSML｜parameter>"
)
_DSML_CALL = r'<｜DSML｜invoke name="(?P<name>[^"]+)">(?P<parameters>.*?)</｜DSML｜invoke>'

HERMES = ToolFormat(
    "hermes",
    CALL_OPEN,
    CALL_CLOSE,
    parse_json,
    head=CALL_HEAD,
    write=write_tagged,
    frame=(f'{CALL_OPEN}\n{{"name": ', ', "arguments": ', f"}}\n{CALL_CLOSE}"),
    separator="\n",
)
TOOL_FORMATS = (
    HERMES,
    _tags("qwen-xml", CALL_OPEN, CALL_CLOSE, _XML_CALL, _XML_PARAMETER),
    _tags("seed", "<seed:tool_call>", "</seed:tool_call>", _XML_CALL, _XML_PARAMETER),
    _tags(
        "glm",
        CALL_OPEN,
        CALL_CLOSE,
        r"\s*(?P<name>[^\s<>{}()\[\]'\"]+)\s*(?P<parameters>(?:<arg_key>.*)?)\Z",
        r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
        inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    _tags(
        "minimax",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        r'<invoke name="(?P<name>[^"]+)">(?P<parameters>.*?)</invoke>',
        _NAMED_PARAMETER,
    ),
    _tags(
        "dsml",
        "<｜DSML｜function_calls>",
        "</｜DSML｜function_calls>",
        _DSML_CALL,
        _DSML_PARAMETER,
        inner=("｜DSML｜",),
    ),
    _tags(
        "dsml-v4",
        "<｜DSML｜tool_calls>",
        "</｜DSML｜tool_calls>",
        _DSML_CALL,
        _DSML_PARAMETER,
        inner=("｜DSML｜",),
    ),
    _named(
        "kimi",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+):\d+)\s*<\|tool_call_argument_begin\|>\s*",
        wrappers=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        inner=("<|tool_call_argument_begin|>",),
    ),
    _named(
        "deepseek-v3",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        r"function<｜tool▁sep｜>(?P<name>[^\s`]+)\s*```json\s*",
        wrappers=_DEEPSEEK,
        inner=("<｜tool▁sep｜>",),
    ),
    _named(
        "deepseek-v3.1",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        r"\s*(?P<name>[^\s<]+)<｜tool▁sep｜>\s*",
        wrappers=_DEEPSEEK,
        inner=("<｜tool▁sep｜>",),
    ),
    _named(
        "harmony",
        "to=functions.",
        "",
        r"(?P<name>[^\s<]+)[^{]*?<\|message\|>\s*",
        wrappers=("<|channel|>commentary ", "<|channel|>analysis "),
        inner=("<|channel|>", "<|constrain|>", "<|message|>"),
    ),
    _named(
        "mistral-args",
        "[TOOL_CALLS]",
        "",
        r"\s*(?P<name>[^\s\[\]{]+)(?:\[CALL_ID\](?P<id>[^\[]+))?\[ARGS\]\s*",
        inner=("[CALL_ID]", "[ARGS]"),
    ),
    ToolFormat("mistral-json", "[TOOL_CALLS]", "", partial(parse_json, has_ids=True)),
    ToolFormat("gemma", "<|tool_call>", "<tool_call|>", parse_gemma, inner=(GEMMA_QUOTE,)),
    ToolFormat("phi", "<|tool_call|>", "<|/tool_call|>", parse_json),
    ToolFormat("granite", "<|tool_call|>", "", parse_json, write=write_list),
    ToolFormat("nemotron", "<TOOLCALL>", "</TOOLCALL>", parse_json),
    ToolFormat("tool-calls", "<tool_calls>", "</tool_calls>", parse_json),
    ToolFormat("command-r", "<|START_ACTION|>", "<|END_ACTION|>", parse_json),
    ToolFormat("apertus", "<|tools_prefix|>", "<|tools_suffix|>", parse_json_by_name),
    ToolFormat("gigachat", "<|function_call|>", "", parse_json),
    ToolFormat("lfm", "<|tool_call_start|>", "<|tool_call_end|>", parse_python, write=write_python),
    ToolFormat("olmo", "<function_calls>", "</function_calls>", parse_python),
    ToolFormat(
        "llama",
        "",
        "",
        parse_json,
        wrappers=("<|python_tag|>",),
        frame=('{"name": ', ', "parameters": ', "}"),
    ),
)
"""The formats of tool calls. The first one that parses the calls of a chat template is used."""

THINK = ReasoningFormat("<think>", "</think>")
REASONING_FORMATS = (
    ReasoningFormat(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        ("<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>", "<|end|>"),
    ),
    ReasoningFormat("[THINK]", "[/THINK]"),
    ReasoningFormat("<seed:think>", "</seed:think>"),
    ReasoningFormat("<mm:think>", "</mm:think>"),
    ReasoningFormat("<|channel>thought\n", "<channel|>"),
    ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),
    THINK,
)
"""The formats of reasoning. The first one whose texts the chat template or the tokenizer has is used."""
