"""Message hashes and hash chains."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from instar.record.hashing import (
    DIGEST_SIZE,
    HashChain,
    MessageHasher,
    is_prompt_digest,
    unpack_digests,
    unpack_prompt_digest,
)
from instar.types import Message, Tool, ToolCall

HASHER = MessageHasher(b"key")
TOOL = Tool(name="f", description="d", parameters={"type": "object", "properties": {}})


def user(text: str, **fields: Any) -> Message:
    return Message(**{"role": "user", "content": text, **fields})


def reply(text: str = "", *arguments: str, id_prefix: str = "c", **fields: Any) -> Message:
    calls = [ToolCall(id=f"{id_prefix}{i}", name="f", arguments=value) for i, value in enumerate(arguments)]
    return Message(
        **{"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {}), **fields}
    )


def hash_canonical(message: Message) -> bytes:
    return HASHER.hash_message(message)[:DIGEST_SIZE]


def hash_exact(message: Message) -> bytes:
    return HASHER.hash_message(message)[DIGEST_SIZE:]


EQUIVALENT_MESSAGES = [
    (reply("hi"), reply(" hi\n")),
    (reply("hi"), reply("hi", reasoning="because")),
    (reply("", '{"a": 1, "b": [2]}'), reply("", '{"b":[2],"a":1}')),
    (reply("", '{"a": "é"}'), reply("", '{"a": "\\u00e9"}')),
    (reply("", "{}", id_prefix="call-"), reply("", "{}", id_prefix="toolu_")),
    (
        Message(role="tool", content="x", tool_call_id="1"),
        Message(role="tool", content="x", tool_call_id="2", name="f"),
    ),
]
DIFFERENT_MESSAGES = [
    (user("hi"), user("hi ")),
    (user("hi"), user("hi", name="ann")),
    (user("hi"), reply("hi")),
    (user("hi"), Message(role="system", content="hi")),
    (user("hi"), Message(role="tool", content="hi", tool_call_id="1")),
    (reply("hi"), reply("hi", "{}")),
    (reply("", "{}"), reply("", "{}", "{}")),
    (reply("", '{"a": 1}'), reply("", '{"a": 2}')),
    (reply("", '{"a": 1}'), reply("", '{"a": "1"}')),
    (reply("", '{"a": 1}'), reply("", '{"a": true}')),
    (reply("", "{broken"), reply("", "{broken ")),
    (user("\ud800"), user("\udfff")),
    (reply("", '{"a": 1e999}'), reply("", '{"a": 10}')),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second"), EQUIVALENT_MESSAGES)
def test_hasher_ignores_changes_that_agents_make(first: Message, second: Message) -> None:
    assert hash_canonical(first) == hash_canonical(second)
    assert hash_exact(first) != hash_exact(second)


@pytest.mark.parametrize(("first", "second"), DIFFERENT_MESSAGES)
def test_hasher_distinguishes_different_messages(first: Message, second: Message) -> None:
    assert hash_canonical(first) != hash_canonical(second)
    assert hash_exact(first) != hash_exact(second)


@pytest.mark.parametrize(
    "message",
    [
        user("\ud800 \x00 🌍"),
        reply("", json.dumps({"n": 10**40, "f": 1e308})),
        reply("", '{"a":' * 400 + "1" + "}" * 400),
        reply("", '{"a":' * 60_000 + "1" + "}" * 60_000),
        reply("", "[NaN, Infinity]"),
        reply("", '"\\ud800"'),
    ],
)
def test_hasher_accepts_unusual_messages(message: Message) -> None:
    assert len(HASHER.hash_message(message)) == 2 * DIGEST_SIZE
    assert HASHER.hash_message(message) == MessageHasher(b"key").hash_message(json.loads(json.dumps(message)))


def test_hasher_uses_its_key() -> None:
    other = MessageHasher(b"other key")
    assert HASHER.hash_message(user("hi"))[:DIGEST_SIZE] not in other.hash_message(user("hi"))
    assert HASHER.hash_tools([TOOL]) != other.hash_tools([TOOL])
    assert HASHER.hash_tools([]) != other.hash_tools([])
    assert HASHER.hash_text("hi") != other.hash_text("hi")
    assert HASHER.pack_prompt_digest("a", "b") != other.pack_prompt_digest("a", "b")


def make_random_message(rng: random.Random) -> Message:
    text = "".join(rng.choices("ab \n", k=rng.randint(0, 3)))
    return rng.choice([user(text), reply(text), reply(text, "{}"), Message(role="system", content=text)])


def test_hash_chain_links_are_equal_only_for_equal_prefixes() -> None:
    rng = random.Random(1)
    prefixes: dict[bytes, str] = {}
    for _ in range(300):
        messages = [make_random_message(rng) for _ in range(rng.randint(1, 6))]
        chain = HASHER.hash_messages(messages, [TOOL] if rng.random() < 0.5 else [])
        assert len(chain) == len(messages)
        for count, link in enumerate(chain.exact):
            prefix = json.dumps(messages[:count])
            assert prefixes.setdefault(link, prefix) == prefix
    assert len(set(prefixes.values())) == len(prefixes)


def test_hash_chain_prefix_can_be_extended() -> None:
    rng = random.Random(2)
    for _ in range(100):
        messages = [make_random_message(rng) for _ in range(8)]
        expected, cut = HASHER.hash_messages(messages, [TOOL]), rng.randint(0, 8)
        extended = expected.prefix(cut).extend(map(HASHER.hash_message, messages[cut:]))
        assert extended == expected
        assert expected.with_tools(HASHER.hash_tools([])) == HASHER.hash_messages(messages)


def test_hash_chain_key_covers_messages_and_tools() -> None:
    assert HASHER.hash_messages([user("a")]).key != HASHER.hash_messages([user("a")], [TOOL]).key
    assert HASHER.hash_messages([user("a")]).key == HASHER.hash_messages([user("a")]).key
    changed = Tool(name="f", description="D", parameters={"type": "object", "properties": {}})
    assert HASHER.hash_messages([user("a")], [TOOL]).key != HASHER.hash_messages([user("a")], [changed]).key


def test_hash_chain_pack_can_be_unpacked() -> None:
    messages = [user("a"), reply("b"), user("c"), reply("d")]
    chain: HashChain = HASHER.hash_messages(messages, [TOOL])
    for start in range(5):
        packed = chain.pack(start)
        assert not is_prompt_digest(packed)
        tools, digests = unpack_digests(packed)
        assert chain.prefix(start).with_tools(tools).extend(digests) == chain
    packed = HASHER.pack_prompt_digest("once", " upon")
    assert is_prompt_digest(packed)
    assert unpack_prompt_digest(packed) == (HASHER.hash_text("once"), (9, HASHER.hash_text("once upon")))
