"""Convert sessions to conversations for SFT and DPO, in the format that TRL reads.

The rows hold text, which the other trainer renders and tokenizes itself. Only the importable formats include
the sampled tokens.
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
    """Writes each row to the file for its kind. A file is created with its first row."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, TextIO] = {}
        self._hashes: dict[str, Any] = {}

    def add(self, **rows: Rows) -> None:
        for name, new_rows in rows.items():
            for row in new_rows:
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
        text = "".join(f"{name} {self._hashes[name].hexdigest()}\n" for name in sorted(self._hashes))
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def build_sft_rows(record: SessionRecord, reward: float | None, min_reward: float | None) -> dict[str, Rows]:
    """Return each conversation as a list of messages, and each reply as the completion of its prompt.

    Only sessions with a reward of at least ``min_reward`` (default: above 0) count. Corrected replies are
    included whatever the reward.
    """
    rows: dict[str, Rows] = {"messages": [], "completions": _corrections(record)}
    good = reward is not None and (reward > 0 if min_reward is None else reward >= min_reward)
    if not good or not _is_usable(record):
        return rows
    for call in _conversations(record.calls):
        tools = _tools(call.tools)
        rows["messages"].append({"messages": _messages([*call.messages, call.reply]), **tools})
    for call in record.calls:
        if _is_complete(call):
            rows["completions"].append(_completion(call, call.reply))
    return rows


def _completion(call: Call, reply: Message) -> Json:
    return {"prompt": _messages(call.messages), "completion": _messages([reply]), **_tools(call.tools)}


def _corrections(record: SessionRecord) -> Rows:
    calls = {call.call_id: call for call in record.calls}
    return [
        _completion(calls[item.call_id], Message(role="assistant", content=item.correction))
        for item in record.feedback
        if item.correction is not None and item.call_id in calls and not _is_untrainable(record)
    ]


def build_dpo_rows(group: Sequence[tuple[SessionRecord, float | None]], margin: float) -> Rows:
    """Return pairs of sessions of a group: the best with the worst, the second best with the second worst,
    and so on.

    The rewards of a pair must differ by more than ``margin``. Sessions with several conversations are
    skipped.
    """
    candidates: list[tuple[float, Call]] = []
    for record, reward in group:
        conversations = _conversations(record.calls)
        if reward is not None and len(conversations) == 1 and _is_usable(record):
            candidates.append((reward, conversations[0]))
    candidates.sort(key=lambda candidate: -candidate[0])
    pairs: Rows = []
    for index in range(len(candidates) // 2):
        (high, chosen), (low, rejected) = candidates[index], candidates[-1 - index]
        if high - low > margin and (pair := _make_pair(chosen, rejected)):
            pairs.append({**pair, "chosen_reward": high, "rejected_reward": low})
    return pairs


def _make_pair(chosen: Call, rejected: Call) -> Json | None:
    """Return a pair whose prompt is the common prefix, or None if the first difference is not in a reply."""
    preferred, other = [*chosen.messages, chosen.reply], [*rejected.messages, rejected.reply]
    shared = 0
    while shared < min(len(preferred), len(other)) and preferred[shared] == other[shared]:
        shared += 1
    if shared == 0 or shared == min(len(preferred), len(other)) or chosen.tools != rejected.tools:
        return None
    if preferred[shared]["role"] != "assistant" or other[shared]["role"] != "assistant":
        return None
    return {
        "prompt": _messages(preferred[:shared]),
        "chosen": _messages(preferred[shared:]),
        "rejected": _messages(other[shared:]),
        **_tools(chosen.tools),
    }


def _is_usable(record: SessionRecord) -> bool:
    return record.session.status is SessionStatus.COMPLETED and not _is_untrainable(record)


def _is_untrainable(record: SessionRecord) -> bool:
    return any(tag.name == UNTRAINABLE for tag in record.tags)


def _is_complete(call: Call) -> bool:
    return call.status is CallStatus.OK and call.finish_reason == "stop"


def _conversations(calls: Sequence[Call]) -> list[Call]:
    """Return the last call of each complete conversation, which holds all the messages of the
    conversation."""
    continued = {call.parent_id for call in calls if call.link == "extends"}
    return [call for call in calls if call.call_id not in continued and _is_complete(call)]


def _tools(tools: Sequence[Tool]) -> Json:
    # JSON text, because schemas differ from row to row and a dataset column has one type.
    if not tools:
        return {}
    return {"tools": json.dumps([{"type": "function", "function": dict(tool)} for tool in tools])}


def _messages(messages: Sequence[Message]) -> list[Json]:
    return [_message(message) for message in messages]


def _message(message: Message) -> Json:
    converted: Json = {"role": message["role"], "content": message["content"]}
    if "reasoning" in message:
        converted["reasoning_content"] = message["reasoning"]
    if "tool_call_id" in message:
        converted["tool_call_id"] = message["tool_call_id"]
    if "name" in message:
        converted["name"] = message["name"]
    if "tool_calls" in message:
        converted["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": _parse_arguments(call["arguments"])},
            }
            for call in message["tool_calls"]
        ]
    return converted


def _parse_arguments(text: str) -> Any:
    """Return the parsed arguments, because chat templates serialize them; invalid JSON stays text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
