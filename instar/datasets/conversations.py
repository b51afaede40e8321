"""Sessions as conversations to imitate (SFT) or to prefer (DPO), in the form that TRL reads.

It is text: another trainer renders and tokenizes it as it does. What was sampled is in the whole formats.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from instar.datasets.columns import dump_canonical_json
from instar.store.base import SessionRecord
from instar.types import UNTRAINABLE, Call, CallStatus, Json, Message, SessionStatus, Tool

Rows = list[Json]
FILES = {
    "messages": "messages.jsonl",
    "completions": "prompt_completion.jsonl",
    "pairs": "pairs.jsonl",
}


class ConversationWriter:
    """Writes rows to the files of their form, each made with its first row."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, TextIO] = {}
        self._hashes: dict[str, Any] = {}

    def add(self, **rows: Rows) -> None:
        for name, given in rows.items():
            for row in given:
                if name not in self._files:
                    self._files[name] = (self._folder / FILES[name]).open("w", encoding="utf-8")
                    self._hashes[name] = hashlib.sha256()
                line = dump_canonical_json(row) + "\n"
                self._files[name].write(line)
                self._hashes[name].update(line.encode())

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    @property
    def digest(self) -> str:
        whole = "".join(f"{name} {self._hashes[name].hexdigest()}\n" for name in sorted(self._hashes))
        return f"sha256:{hashlib.sha256(whole.encode()).hexdigest()}"


def sft_rows(record: SessionRecord, reward: float | None, least: float | None) -> dict[str, Rows]:
    """Its conversations, where the reward is at least so much (default: above 0): each as a list of messages,
    and each reply as the completion of what stood before it. An answer that a person corrected is the
    completion whatever the reward."""
    rows: dict[str, Rows] = {"messages": [], "completions": _corrections(record)}
    good = reward is not None and (reward > 0 if least is None else reward >= least)
    if not good or not _usable(record):
        return rows
    for call in _conversations(record.calls):
        tools = _tools(call.tools)
        rows["messages"].append({"messages": _messages([*call.messages, call.reply]), **tools})
    for call in record.calls:
        if _whole(call):
            rows["completions"].append(_completion(call, call.reply))
    return rows


def _completion(call: Call, answer: Message) -> Json:
    return {"prompt": _messages(call.messages), "completion": _messages([answer]), **_tools(call.tools)}


def _corrections(record: SessionRecord) -> Rows:
    calls = {call.call_id: call for call in record.calls}
    return [
        _completion(calls[given.call_id], Message(role="assistant", content=given.correction))
        for given in record.feedback
        if given.correction is not None and given.call_id in calls and not _untrainable(record)
    ]


def dpo_rows(group: Sequence[tuple[SessionRecord, float | None]], margin: float) -> Rows:
    """The best of the group over the worst, the second best over the second worst, and so on, while the
    rewards differ by more than ``margin``. Only sessions that are one conversation are compared."""
    given: list[tuple[float, Call]] = []
    for record, reward in group:
        conversations = _conversations(record.calls)
        if reward is not None and len(conversations) == 1 and _usable(record):
            given.append((reward, conversations[0]))
    given.sort(key=lambda each: -each[0])
    pairs: Rows = []
    for place in range(len(given) // 2):
        (high, chosen), (low, rejected) = given[place], given[-1 - place]
        if high - low > margin and (pair := _pair(chosen, rejected)):
            pairs.append({**pair, "chosen_reward": high, "rejected_reward": low})
    return pairs


def _pair(chosen: Call, rejected: Call) -> Json | None:
    """What both begin with is the prompt, up to where the model's first differing reply stands."""
    one, other = [*chosen.messages, chosen.reply], [*rejected.messages, rejected.reply]
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    if shared == 0 or shared == min(len(one), len(other)) or chosen.tools != rejected.tools:
        return None
    if one[shared]["role"] != "assistant" or other[shared]["role"] != "assistant":
        return None
    return {
        "prompt": _messages(one[:shared]),
        "chosen": _messages(one[shared:]),
        "rejected": _messages(other[shared:]),
        **_tools(chosen.tools),
    }


def _usable(record: SessionRecord) -> bool:
    return record.session.status is SessionStatus.COMPLETED and not _untrainable(record)


def _untrainable(record: SessionRecord) -> bool:
    return any(tag.name == UNTRAINABLE for tag in record.tags)


def _whole(call: Call) -> bool:
    return call.status is CallStatus.OK and call.finish_reason == "stop"


def _conversations(calls: Sequence[Call]) -> list[Call]:
    """The calls that nothing goes on from: each holds a whole conversation. One that was broken off is
    none."""
    continued = {call.parent_id for call in calls if call.link == "extends"}
    return [call for call in calls if call.call_id not in continued and _whole(call)]


def _tools(tools: Sequence[Tool]) -> Json:
    """As JSON text: schemas differ from row to row, and a column of a dataset has one type."""
    if not tools:
        return {}
    return {"tools": json.dumps([{"type": "function", "function": dict(tool)} for tool in tools])}


def _messages(messages: Sequence[Message]) -> list[Json]:
    return [_message(message) for message in messages]


def _message(message: Message) -> Json:
    given: Json = {"role": message["role"], "content": message["content"]}
    if "reasoning" in message:
        given["reasoning_content"] = message["reasoning"]
    if "tool_call_id" in message:
        given["tool_call_id"] = message["tool_call_id"]
    if "name" in message:
        given["name"] = message["name"]
    if "tool_calls" in message:
        given["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": _arguments(call["arguments"])},
            }
            for call in message["tool_calls"]
        ]
    return given


def _arguments(text: str) -> Any:
    """Chat templates write them as JSON themselves; text that is none stays as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text
