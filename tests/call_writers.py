"""Writes tool calls in the formats of model families, independently of the parser."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

Call = tuple[str, str]
"""The name of a tool and its arguments as JSON text."""
WriteCalls = Callable[[Sequence[Call]], str]


def write_hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>' for n, a in calls)


def write_bare(calls: Sequence[Call]) -> str:
    return "; ".join(f'{{"name": "{n}", "parameters": {a}}}' for n, a in calls)


def write_list(begin: str, end: str) -> WriteCalls:
    def write(calls: Sequence[Call]) -> str:
        items = [f'{{"name":"{n}","arguments":{a}}}' for n, a in calls]
        return f"{begin}[{', '.join(items)}]{end}"

    return write


def write_mistral_args(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{a}" for n, a in calls)


def write_mistral_ids(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{n}[CALL_ID]a{i}b2c3d4e[ARGS]{a}" for i, (n, a) in enumerate(calls))


def _values(arguments: str) -> list[tuple[str, str]]:
    items = json.loads(arguments).items()
    return [(k, v if isinstance(v, str) else json.dumps(v, separators=(",", ":"))) for k, v in items]


def write_xml(begin: str, end: str, newline: str = "\n") -> WriteCalls:
    def write(calls: Sequence[Call]) -> str:
        return "\n".join(
            f"{begin}\n<function={n}>\n"
            + "".join(f"<parameter={k}>{newline}{v}{newline}</parameter>\n" for k, v in _values(a))
            + f"</function>\n{end}"
            for n, a in calls
        )

    return write


def write_glm(newline: str) -> WriteCalls:
    def write(calls: Sequence[Call]) -> str:
        return newline.join(
            f"<tool_call>{n}{newline}"
            + "".join(
                f"<arg_key>{k}</arg_key>{newline}<arg_value>{v}</arg_value>{newline}" for k, v in _values(a)
            )
            + "</tool_call>"
            for n, a in calls
        )

    return write


def write_kimi(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{a}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def write_dsml(section: str) -> WriteCalls:
    def write(calls: Sequence[Call]) -> str:
        inner = "".join(
            f'<｜DSML｜invoke name="{n}">\n'
            + "".join(
                f'<｜DSML｜parameter name="{k}" string="{str(isinstance(v, str)).lower()}">'
                f"{v if isinstance(v, str) else json.dumps(v)}</｜DSML｜parameter>\n"
                for k, v in json.loads(a).items()
            )
            + "</｜DSML｜invoke>\n"
            for n, a in calls
        )
        return f"<｜DSML｜{section}>\n{inner}</｜DSML｜{section}>"

    return write


def write_minimax(calls: Sequence[Call]) -> str:
    inner = "".join(
        f'<invoke name="{n}">\n'
        + "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in _values(a))
        + "</invoke>\n"
        for n, a in calls
    )
    return f"<minimax:tool_call>\n{inner}</minimax:tool_call>"


def write_gemma(calls: Sequence[Call]) -> str:
    def write_value(value: Any) -> str:
        if isinstance(value, str):
            return f'<|"|>{value}<|"|>'
        if isinstance(value, dict):
            return "{" + ",".join(f"{k}:{write_value(v)}" for k, v in value.items()) + "}"
        return json.dumps(value)

    return "".join(f"<|tool_call>call:{n}{write_value(json.loads(a))}<tool_call|>" for n, a in calls)


def write_harmony(calls: Sequence[Call]) -> str:
    ((name, arguments),) = calls[:1]
    channel = "<|start|>assistant<|channel|>commentary"
    return f"{channel} to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"


def write_apertus(calls: Sequence[Call]) -> str:
    items = [f'{{"{n}": {a}}}' for n, a in calls]
    return f"<|tools_prefix|>[{', '.join(items)}]<|tools_suffix|>"


def write_command_r(calls: Sequence[Call]) -> str:
    inner = ",\n".join(
        f'    {{"tool_call_id": "{i}", "tool_name": "{n}", "parameters": {a}}}'
        for i, (n, a) in enumerate(calls)
    )
    return f"<|START_ACTION|>[\n{inner}\n]<|END_ACTION|>"


def write_lfm(calls: Sequence[Call]) -> str:
    arguments = [", ".join(f"{k}={v!r}" for k, v in json.loads(a).items()) for _, a in calls]
    inner = ", ".join(f"{n}({a})" for (n, _), a in zip(calls, arguments, strict=True))
    return f"<|tool_call_start|>[{inner}]<|tool_call_end|>"


WRITERS: dict[str, WriteCalls] = {
    "apertus": write_apertus,
    "bare": write_bare,
    "command-r": write_command_r,
    "dsml": write_dsml("function_calls"),
    "dsml-v4": write_dsml("tool_calls"),
    "gemma": write_gemma,
    "glm": write_glm("\n"),
    "glm-compact": write_glm(""),
    "granite": write_list("<|tool_call|>", ""),
    "harmony": write_harmony,
    "hermes": write_hermes,
    "kimi": write_kimi,
    "lfm": write_lfm,
    "minimax": write_minimax,
    "mistral-args": write_mistral_args,
    "mistral-ids": write_mistral_ids,
    "mistral-list": write_list("[TOOL_CALLS]", ""),
    "nemotron": write_list("<TOOLCALL>", "</TOOLCALL>"),
    "seed": write_xml("<seed:tool_call>", "</seed:tool_call>", ""),
    "tool-calls": write_list("<tool_calls>", "</tool_calls>"),
    "xml": write_xml("<tool_call>", "</tool_call>"),
}
