"""Functions that parse the text of tool calls, for the formats in `record.tool_formats`.

They return the calls in the text between the beginning and the end of a call, or raise ValueError if the text
is invalid. The functions `write_...` are the inverse, for chat templates that do not write calls.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

from instar.record.base import Tools
from instar.record.hashing import parse_arguments
from instar.record.tool_calls import (
    CALL_CLOSE,
    CALL_OPEN,
    can_encode,
    find_value_end,
    skip,
    split_members,
)
from instar.types import Json, ToolCall, new_id


def _make_call(name: str, arguments: str, call_id: str | None = None) -> ToolCall:
    if not name or not can_encode(name):
        raise ValueError(f"{name!r} is not a tool's name")
    return ToolCall(id=call_id or new_id("call"), name=name, arguments=arguments)


def _dump(arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    return text if can_encode(text) else json.dumps(arguments)


def parse_json(text: str, tools: Tools, *, has_ids: bool = False) -> list[ToolCall]:
    """Parse a JSON object with a name and arguments, several ones, or a list of them. The arguments stay as
    they were generated."""
    return [_parse_json_call(item, has_ids) for item in _split_objects(text)]


def _parse_json_call(text: str, has_ids: bool) -> ToolCall:
    members = split_members(text)
    name = next((members[key] for key in ("name", "tool_name") if key in members), "")
    arguments = next((members[key] for key in ("arguments", "parameters") if key in members), "{}")
    if not arguments.startswith("{"):
        raise ValueError("the arguments are not an object")
    decoded_name = json.loads(name)
    if not isinstance(decoded_name, str):
        raise ValueError("the name is not a string")
    call_id = json.loads(members.get("id", "null")) if has_ids else None
    return _make_call(decoded_name, arguments, call_id if isinstance(call_id, str) else None)


def parse_json_by_name(text: str, tools: Tools) -> list[ToolCall]:
    """Parse a list of JSON objects whose only key is the tool's name and whose value is the arguments."""
    calls: list[ToolCall] = []
    for item in _split_objects(text):
        ((name, arguments),) = split_members(item).items()
        if not arguments.startswith("{"):
            raise ValueError("the arguments are not an object")
        calls.append(_make_call(name, arguments))
    return calls


def _split_objects(text: str) -> Iterator[str]:
    """Yield the text of each JSON object in a list, or in a sequence with whitespace or `;` in between."""
    text = text.strip()
    if text.startswith("["):
        if not text.endswith("]"):
            raise ValueError("the list is not closed")
        text = text[1:-1]
    position = skip(text, 0)
    if position == len(text):
        raise ValueError("there is no call")
    while position < len(text):
        end = find_value_end(text, position)
        yield text[position:end]
        position = skip(text, end)
        if text[position : position + 1] in (",", ";"):
            position = skip(text, position + 1)


def parse_named(pattern: re.Pattern[str], text: str, tools: Tools) -> list[ToolCall]:
    """Parse the text that ``pattern`` matches, followed by the arguments as a JSON object."""
    match = pattern.match(text)
    if match is None:
        raise ValueError("the call has no name")
    arguments = text[match.end() :].strip().removesuffix("```").rstrip()
    if not arguments.startswith("{") or find_value_end(arguments, 0) != len(arguments):
        raise ValueError("the arguments are not an object")
    call_id = match["id"] if "id" in pattern.groupindex else None
    return [_make_call(match["name"], arguments, call_id)]


def parse_tags(
    call_pattern: re.Pattern[str], parameter_pattern: re.Pattern[str], text: str, tools: Tools
) -> list[ToolCall]:
    """Parse calls with tags around each argument. A value is a string if the tool's schema says so, and else
    JSON or a string."""
    calls: list[ToolCall] = []
    position = 0
    for match in call_pattern.finditer(text):
        body = match["parameters"]
        if text[position : match.start()].strip() or parameter_pattern.sub("", body).strip():
            raise ValueError("there is text outside of tags")
        arguments = {
            parameter["key"]: _convert(parameter, match["name"], tools)
            for parameter in parameter_pattern.finditer(body)
        }
        calls.append(_make_call(match["name"], _dump(arguments)))
        position = match.end()
    if text[position:].strip() or not calls:
        raise ValueError("the call is not closed")
    return calls


def _convert(parameter: re.Match[str], name: str, tools: Tools) -> Any:
    text = parameter["value"]
    if is_string := parameter.groupdict().get("string"):
        return text if is_string == "true" else _load_or_text(text)
    schema: Any = next((tool["parameters"] for tool in tools if tool["name"] == name), {})
    properties: Any = schema.get("properties")
    spec: Any = properties.get(parameter["key"]) if isinstance(properties, dict) else None
    types: Any = spec.get("type") if isinstance(spec, dict) else None
    if types == "string" or (isinstance(types, list) and "string" in types and text != "null"):
        return text
    return _load_or_text(text)


def _load_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def parse_python(text: str, tools: Tools) -> list[ToolCall]:
    """Parse calls in Python's syntax, as a list or one per line."""
    text = text.strip()
    source = text if text.startswith("[") else f"[{','.join(text.splitlines())}]"
    try:
        tree: Any = ast.parse(source, mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            raise ValueError("there is no list of calls")
        return [_parse_python_call(item) for item in tree.elts]
    except (SyntaxError, MemoryError) as error:
        raise ValueError(str(error)) from error


def _parse_python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("a call may only have named arguments")
    arguments = {str(keyword.arg): _evaluate(keyword.value) for keyword in node.keywords}
    return _make_call(ast.unparse(node.func), _dump(arguments))


def _evaluate(node: ast.expr) -> Any:
    """Return the value of a literal, in which names of JSON such as `true` are allowed."""
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_evaluate(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        items = zip(node.keys, node.values, strict=True)
        return {str(ast.literal_eval(key)): _evaluate(value) for key, value in items if key is not None}
    return ast.literal_eval(node)


_JSON_NAMES = {"true": True, "false": False, "null": None}


def parse_gemma(text: str, tools: Tools) -> list[ToolCall]:
    """Parse `call:NAME{key:value,...}`, where strings are between quote tokens and keys are not quoted."""
    match = _GEMMA_HEAD.match(text)
    if match is None:
        raise ValueError("the call has no name")
    arguments, end = _parse_gemma_value(text, match.end() - 1)
    if text[end:].strip() or not isinstance(arguments, dict):
        raise ValueError("the call is not closed")
    return [_make_call(match["name"], _dump(cast(Json, arguments)))]


def _parse_gemma_value(text: str, position: int) -> tuple[Any, int]:
    if text.startswith(GEMMA_QUOTE, position):
        start = position + len(GEMMA_QUOTE)
        end = text.index(GEMMA_QUOTE, start)
        return text[start:end], end + len(GEMMA_QUOTE)
    opener = text[position : position + 1]
    if opener not in ("{", "["):
        match = _GEMMA_SCALAR.match(text, position)
        assert match is not None  # it matches the empty string
        return json.loads(match[0]), match.end()
    closer, items, keys = {"{": "}", "[": "]"}[opener], list[Any](), list[str]()
    position = skip(text, position + 1)
    while text[position : position + 1] != closer:
        if opener == "{":
            if text.startswith(GEMMA_QUOTE, position):
                key, position = _parse_gemma_value(text, position)
                position = text.index(":", position)
            else:
                key, position = text[position : text.index(":", position)], text.index(":", position)
            keys.append(key)
            position += 1
        item, position = _parse_gemma_value(text, position)
        items.append(item)
        position = skip(text, position)
        if text[position : position + 1] == ",":
            position = skip(text, position + 1)
        elif text[position : position + 1] != closer:
            raise ValueError("a value is not closed")
    return (dict(zip(keys, items, strict=True)) if opener == "{" else items), position + 1


def write_tagged(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f"{CALL_OPEN}\n{_write_object(call)}\n{CALL_CLOSE}" for call in calls)


def write_list(calls: Sequence[ToolCall]) -> str:
    return f"<|tool_call|>[{', '.join(map(_write_object, calls))}]"


def _write_object(call: ToolCall) -> str:
    arguments = (
        call["arguments"] if isinstance(parse_arguments(call), dict) else json.dumps(call["arguments"])
    )
    return f'{{"name": {json.dumps(call["name"], ensure_ascii=False)}, "arguments": {arguments}}}'


def write_python(calls: Sequence[ToolCall]) -> str:
    return f"<|tool_call_start|>[{', '.join(map(_write_python_call, calls))}]<|tool_call_end|>"


def _write_python_call(call: ToolCall) -> str:
    arguments = parse_arguments(call)
    items = cast(Json, arguments).items() if isinstance(arguments, dict) else ()
    return f"{call['name']}({', '.join(f'{key}={value!r}' for key, value in items)})"


GEMMA_QUOTE = '<|"|>'
_GEMMA_HEAD = re.compile(r"\s*call:(?P<name>[^\s{]+)\{")
_GEMMA_SCALAR = re.compile(r"[^,}\]]*")
