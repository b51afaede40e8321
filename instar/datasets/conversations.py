"""Converts sessions to conversations for SFT and DPO, in the format that TRL reads. The rows contain text,
which TRL renders and tokenizes. Only the importable formats contain sampled tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from instar.datasets.columns import dump_canonical_json
from instar.datasets.manifest import ContentHash
from instar.record.base import to_template_message
from instar.store.base import SessionRecord
from instar.types import (
    UNTRAINABLE,
    Call,
    CallStatus,
    Feedback,
    Json,
    Message,
    RewardSource,
    SessionStatus,
    Tool,
)

Rows = list[Json]
FILE_NAMES = {
    "messages": "messages.jsonl",
    "completions": "prompt_completion.jsonl",
    "pairs": "pairs.jsonl",
}


class ConversationWriter:
    """Writes each type of row to its own file, which is created with the first row."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, TextIO] = {}
        self._hash = ContentHash()

    def add(self, **rows: Rows) -> None:
        for name, new_rows in rows.items():
            for row in new_rows:
                if name not in self._files:
                    self._files[name] = (self._folder / FILE_NAMES[name]).open("w", encoding="utf-8")
                self._files[name].write(self._hash.add_line(name, dump_canonical_json(row)) + "\n")

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest(*sorted(self._files))


def build_sft_rows(record: SessionRecord, reward: float | None, min_reward: float | None) -> dict[str, Rows]:
    """Return two types of rows: ``messages`` has one row per conversation, ``completions`` one per reply.
    Only completed sessions with a reward of at least ``min_reward`` are included; None means any reward above
    0. Human corrections are added to ``completions`` whatever the reward. Untrainable sessions have none."""
    rows: dict[str, Rows] = {"messages": [], "completions": _make_correction_rows(record)}
    has_min_reward = reward is not None and (reward > 0 if min_reward is None else reward >= min_reward)
    if has_min_reward and _is_usable(record):
        for call in _find_last_calls(record.calls):
            messages = [to_template_message(message) for message in (*call.messages, call.reply)]
            rows["messages"].append({"messages": messages, **_convert_tools(call.tools)})
        for call in record.calls:
            if _is_complete(call):
                rows["completions"].append(_make_completion(call, call.reply))
    return rows


def _make_completion(call: Call, reply: Message) -> Json:
    return {
        "prompt": list(map(to_template_message, call.messages)),
        "completion": [to_template_message(reply)],
        **_convert_tools(call.tools),
    }


def _make_correction_rows(record: SessionRecord) -> Rows:
    """Return a completion for each human correction. Corrections by agents are left out."""
    if _is_untrainable(record):
        return []
    calls = {call.call_id: call for call in record.calls}
    return [
        _make_completion(calls[item.call_id], Message(role="assistant", content=item.correction))
        for item in record.feedback
        if item.correction is not None and item.call_id in calls and item.source is RewardSource.HUMAN
    ]


def build_dpo_rows(group: Sequence[tuple[SessionRecord, float | None]], margin: float) -> Rows:
    """Pair the sessions of a group: the best with the worst, the second best with the second worst, etc. The
    rewards in a pair must differ by more than ``margin``. The conversations must have the same tools and
    first differ in a reply. Only completed, trainable sessions with one complete conversation are used."""
    candidates: list[tuple[float, Call]] = []
    for record, reward in group:
        last_calls = _find_last_calls(record.calls)
        if reward is not None and len(last_calls) == 1 and _is_usable(record):
            candidates.append((reward, last_calls[0]))
    candidates.sort(key=lambda candidate: -candidate[0])
    pairs: Rows = []
    for index in range(len(candidates) // 2):
        (high, chosen), (low, rejected) = candidates[index], candidates[-1 - index]
        if high - low > margin and (pair := _make_pair(chosen, rejected)):
            pairs.append({**pair, "chosen_reward": high, "rejected_reward": low})
    return pairs


def build_preference_rows(record: SessionRecord, other_calls: Mapping[str, Call]) -> Rows:
    """Return a pair for each preference of a person in the session. ``other_calls`` are the calls that the
    preferences name, by id. Preferences between replies to different prompts are left out."""
    if _is_untrainable(record):
        return []
    calls = {call.call_id: call for call in record.calls}
    pairs: Rows = []
    for item in record.feedback:
        call = calls.get(item.call_id or "")
        other = _find_other_reply(item, call, other_calls)
        if call is not None and other is not None:
            chosen, rejected = (call, other) if item.preferred == "this" else (other, call)
            if pair := _make_pair(chosen, rejected):
                pairs.append(pair)
    return pairs


def _find_other_reply(item: Feedback, call: Call | None, other_calls: Mapping[str, Call]) -> Call | None:
    """Return the other reply of a preference, as a call."""
    if call is None or item.preferred is None or item.source is not RewardSource.HUMAN:
        return None
    if item.other_call_id is not None:
        return other_calls.get(item.other_call_id)
    return replace(call, reply=Message(role="assistant", content=item.other_text or ""))


def _make_pair(chosen: Call, rejected: Call) -> Json | None:
    """Return a pair of conversations with their common prefix as the prompt. Return None if there is no such
    prefix, if the tools differ, or if the first difference is not in a reply."""
    chosen_messages = [*chosen.messages, chosen.reply]
    rejected_messages = [*rejected.messages, rejected.reply]
    length = min(len(chosen_messages), len(rejected_messages))
    split = next((i for i in range(length) if chosen_messages[i] != rejected_messages[i]), length)
    if split in (0, length) or chosen.tools != rejected.tools:
        return None
    if any(messages[split]["role"] != "assistant" for messages in (chosen_messages, rejected_messages)):
        return None
    return {
        "prompt": list(map(to_template_message, chosen_messages[:split])),
        "chosen": list(map(to_template_message, chosen_messages[split:])),
        "rejected": list(map(to_template_message, rejected_messages[split:])),
        **_convert_tools(chosen.tools),
    }


def _is_usable(record: SessionRecord) -> bool:
    return record.session.status is SessionStatus.COMPLETED and not _is_untrainable(record)


def _is_untrainable(record: SessionRecord) -> bool:
    return any(tag.name == UNTRAINABLE for tag in record.tags)


def _is_complete(call: Call) -> bool:
    return call.status is CallStatus.OK and call.finish_reason == "stop"


def _find_last_calls(calls: Sequence[Call]) -> list[Call]:
    """Return the last call of each conversation, which has all its messages, if the reply is complete."""
    extended_ids = {call.parent_id for call in calls if call.link == "extends"}
    return [call for call in calls if call.call_id not in extended_ids and _is_complete(call)]


def _convert_tools(tools: Sequence[Tool]) -> Json:
    # Encoded as JSON text, because schemas differ between rows and a dataset column has one type.
    if not tools:
        return {}
    return {"tools": json.dumps([{"type": "function", "function": dict(tool)} for tool in tools])}
