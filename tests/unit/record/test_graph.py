from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from instar.record.base import Placement, Renderer
from instar.record.graph import MessageGraph
from instar.record.hashing import HashChain, MessageHasher
from instar.record.render import TemplateRenderer
from instar.store.base import CallDelta
from instar.types import Call, CallStatus, Link, Message, Tool, ToolCall, new_id
from tests.unit.record.conftest import Load
from tests.unit.record.talk import CALC, echo, follow_up, reply_text, words
from tests.unit.record.test_render import COUNTING

HASHER = MessageHasher(b"key")


def user(text: str) -> Message:
    return Message(role="user", content=text)


class Talk:
    """A graph with what was recorded in it, as the gateway would drive it."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.graph = MessageGraph(HASHER)
        self.calls: list[Call] = []

    def place(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Placement:
        placement = self.graph.place(self.chain(messages, tools), messages, tools, self.renderer)
        self.graph.release(placement)
        return placement

    def chain(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> HashChain:
        return self.graph.match_replies(HASHER.hash_messages(messages, tools), messages)

    def say(
        self,
        messages: Sequence[Message],
        sampled: list[int],
        tools: Sequence[Tool] = (),
        status: CallStatus = CallStatus.OK,
    ) -> Call:
        place, chain = self.place(messages, tools), self.chain(messages, tools)
        reply = self.renderer.parse(sampled, tools)
        whole = chain.extend([HASHER.hash_message(reply)])
        call = Call(
            call_id=new_id("call"),
            session_id="s",
            run_id="r",
            agent_id="a",
            policy_id="p",
            request_id=new_id("req"),
            prompt_ids=place.prompt_ids,
            sampled_ids=np.asarray(sampled, np.int32),
            logprobs=np.zeros(len(sampled), np.float32),
            versions=np.zeros(len(sampled), np.int32),
            messages=tuple(messages),
            reply=reply,
            finish_reason="stop",
            tools=tuple(tools),
            parent_id=place.parent_id,
            link=place.link,
            base_id=place.base_id,
            base_tokens=place.base_tokens,
            base_messages=place.base_messages,
            status=status,
            digests=whole.pack(place.base_messages),
        )
        self.check_base(call)
        self.graph.add(call, place, whole)
        self.calls.append(call)
        return call

    def check_base(self, call: Call) -> None:
        """What is left to the base is there, token by token and byte by byte."""
        if call.base_id is None:
            assert (call.base_tokens, call.base_messages) == (0, 0)
            return
        base = next(other for other in self.calls if other.call_id == call.base_id)
        assert np.array_equal(base.sequence[: call.base_tokens], call.prompt_ids[: call.base_tokens])
        assert [*base.messages, base.reply][: call.base_messages] == list(call.messages[: call.base_messages])

    def ids(self, text: str) -> list[int]:
        assert isinstance(self.renderer, TemplateRenderer)
        return [*self.renderer.encode(text), self.renderer.stop_token_ids[0]]


def test_random_sessions_extend_exactly(tiny: TemplateRenderer) -> None:
    rng = random.Random(3)
    for _ in range(60):
        talk = Talk(tiny)
        messages = [user(words(rng))]
        tools = [CALC] if rng.random() < 0.8 else []
        parent: Call | None = None
        for _ in range(rng.randint(2, 6)):
            call = talk.say(messages, talk.ids(reply_text(rng)), tools)
            assert call.link is (Link.EXTENDS if parent else Link.ROOT)
            if parent:
                assert call.parent_id == parent.call_id
                assert np.array_equal(call.prompt_ids[: len(parent.sequence)], parent.sequence)
                assert call.base_messages >= len(parent.messages)
            parent = call
            messages = [*messages, echo(rng, call.reply), *follow_up(rng, call.reply)]


def test_rewritten_history_is_a_branch_that_shares_its_prefix(tiny: TemplateRenderer) -> None:
    talk = Talk(tiny)
    system = Message(role="system", content="You are careful, and this is long enough to share.")
    first = talk.say([system, user("one")], talk.ids("two"))
    second = talk.say([system, user("one"), first.reply, user("three")], talk.ids("four"))
    rewritten = [system, user("one"), Message(role="assistant", content="summary"), user("five")]
    branch = talk.say(rewritten, talk.ids("six"))
    assert branch.link is Link.BRANCH
    assert branch.parent_id is None
    assert branch.base_messages == 2
    assert branch.base_tokens >= len(tiny.render([system])) - 4
    again = talk.say([*rewritten, branch.reply, user("seven")], talk.ids("eight"))
    assert (again.link, again.parent_id) == (Link.EXTENDS, branch.call_id)
    old = talk.say([*second.messages, second.reply, user("nine")], talk.ids("ten"))
    assert (old.link, old.parent_id) == (Link.EXTENDS, second.call_id)


def test_user_text_is_compared_exactly(tiny: TemplateRenderer) -> None:
    talk = Talk(tiny)
    first = talk.say([user("one")], talk.ids("two"))
    assert talk.place([user("one "), first.reply, user("x")]).link is Link.BRANCH


def test_repeated_messages_are_a_sibling(tiny: TemplateRenderer) -> None:
    talk = Talk(tiny)
    root = talk.say([user("one")], talk.ids("two"))
    child = talk.say([user("one"), root.reply, user("x")], talk.ids("three"))
    again = talk.say([user("one"), root.reply, user("x")], talk.ids("four"))
    assert (again.link, again.parent_id, again.base_id) == (Link.SIBLING, root.call_id, child.call_id)
    assert np.array_equal(again.prompt_ids, child.prompt_ids)
    assert talk.graph.find_recorded(talk.place([user("one")]).key) == [root.call_id]


def test_identical_requests_in_flight_are_siblings(tiny: TemplateRenderer) -> None:
    graph, chain = MessageGraph(HASHER), HASHER.hash_messages([user("one")])
    one = graph.place(chain, [user("one")], (), tiny)
    two = graph.place(chain, [user("one")], (), tiny)
    assert (one.link, two.link) == (Link.ROOT, Link.SIBLING)
    graph.release(one)
    graph.release(two)
    assert graph.place(chain, [user("one")], (), tiny).link is Link.ROOT


def test_parent_has_the_same_call_ids_or_is_the_newest(tiny: TemplateRenderer) -> None:
    talk = Talk(tiny)
    text = '<tool_call>{"name": "calc", "arguments": {"expression": "1"}}</tool_call>'
    old = talk.say([user("one")], talk.ids(text), [CALC])
    new = talk.say([user("one")], talk.ids(text), [CALC])
    result = Message(role="tool", content="1")
    assert talk.place([user("one"), old.reply, result], [CALC]).parent_id == old.call_id
    anonymous = Message(role="assistant", content="", tool_calls=[_renamed(new)])
    assert talk.place([user("one"), anonymous, result], [CALC]).parent_id == new.call_id


def _renamed(call: Call) -> ToolCall:
    (made,) = call.reply.get("tool_calls", ())
    return ToolCall(id="x", name=made["name"], arguments='{ "expression" : "1" }')


def test_changed_tools_branch(tiny: TemplateRenderer) -> None:
    talk = Talk(tiny)
    first = talk.say([user("one")], talk.ids("two"), [CALC])
    assert talk.place([user("one"), first.reply, user("x")], []).link is Link.BRANCH


def test_template_that_cannot_be_bridged_branches(load: Load) -> None:
    talk = Talk(load(COUNTING))
    first = talk.say([user("one")], talk.ids("two"))
    assert talk.say([user("one"), first.reply, user("x")], talk.ids("y")).link is Link.BRANCH


def part(call: Call, *, digests: bool = True) -> CallDelta:
    """Return the call as the store returns it."""
    return CallDelta(
        call_id=call.call_id,
        request_id=call.request_id,
        parent_id=call.parent_id,
        link=call.link,
        base_id=call.base_id,
        base_tokens=call.base_tokens,
        base_messages=call.base_messages,
        prompt_tail=call.prompt_ids[call.base_tokens :],
        sampled_ids=call.sampled_ids,
        message_count=len(call.messages),
        status=call.status,
        trainable=call.trainable,
        reason=call.reason,
        client_key=call.client_key,
        digests=call.digests if digests else b"",
        reply=call.reply,
        messages=() if digests else call.messages[call.base_messages :],
        tools=() if digests else call.tools,
    )


@pytest.mark.parametrize("digests", [True, False])
def test_restored_graph_gives_the_same_placements(tiny: TemplateRenderer, digests: bool) -> None:
    rng = random.Random(4)
    talk = Talk(tiny)
    messages = [user("go")]
    for _ in range(8):
        call = talk.say(messages, talk.ids(reply_text(rng)), [CALC])
        messages = [*messages, echo(rng, call.reply), *follow_up(rng, call.reply)]
        if rng.random() < 0.3:
            talk.say([user("elsewhere"), user(words(rng))], talk.ids("fine"), [CALC])
    rebuilt = MessageGraph(HASHER, [part(call, digests=digests) for call in talk.calls])
    one = talk.place(messages, [CALC])
    two = rebuilt.place(talk.chain(messages, [CALC]), messages, [CALC], tiny)
    assert one.link is Link.EXTENDS
    assert np.array_equal(one.prompt_ids, two.prompt_ids)
    assert (one.parent_id, one.base_tokens, one.base_messages) == (
        two.parent_id,
        two.base_tokens,
        two.base_messages,
    )
    assert rebuilt.finished_requests == talk.graph.finished_requests == len(talk.calls)


def test_reply_with_added_defaults_is_matched_by_call_ids(tiny: TemplateRenderer) -> None:
    talk = Talk(tiny)
    text = '<tool_call>{"name": "calc", "arguments": {"expression": "1"}}</tool_call>'
    first = talk.say([user("one")], talk.ids(text), [CALC])
    result = Message(role="tool", content="1")
    filled = _changed(first, '{"exact": false, "expression": "1"}')
    second = talk.say([user("one"), filled, result], talk.ids("two"), [CALC])
    assert (second.link, second.parent_id) == (Link.EXTENDS, first.call_id)
    third = talk.place([user("one"), filled, result, second.reply, user("x")], [CALC])
    assert (third.link, third.parent_id) == (Link.EXTENDS, second.call_id)
    rebuilt = MessageGraph(HASHER, map(part, talk.calls))
    again = [user("one"), filled, result, second.reply, user("x")]
    chain = rebuilt.match_replies(HASHER.hash_messages(again, [CALC]), again)
    assert rebuilt.place(chain, again, [CALC], tiny).parent_id == second.call_id


def test_reply_with_a_changed_argument_is_a_branch(tiny: TemplateRenderer) -> None:
    talk = Talk(tiny)
    text = '<tool_call>{"name": "calc", "arguments": {"expression": "1"}}</tool_call>'
    first = talk.say([user("one")], talk.ids(text), [CALC])
    edited = _changed(first, '{"expression": "2"}')
    result = Message(role="tool", content="1")
    assert talk.place([user("one"), edited, result], [CALC]).link is Link.BRANCH


def _changed(call: Call, arguments: str) -> Message:
    (made,) = call.reply.get("tool_calls", ())
    plain = made["id"].replace("-", "")
    return Message(
        role="assistant",
        content=call.reply["content"],
        tool_calls=[ToolCall(id=plain, name=made["name"], arguments=arguments)],
    )


def test_prompts_without_messages_continue_by_text_and_by_tokens(tiny: TemplateRenderer) -> None:
    talk = Talk(tiny)
    graph = talk.graph
    first = graph.place_prompt("Once upon", tiny)
    graph.release(first)
    call = _prompted(talk, first, "Once upon", " a time")
    by_text = graph.place_prompt("Once upon a time there", tiny)
    assert (by_text.link, by_text.parent_id) == (Link.EXTENDS, call.call_id)
    assert by_text.prompt_ids.tolist() == [*call.sequence.tolist(), *tiny.encode(" there")]
    by_ids = graph.place_prompt([*call.sequence.tolist(), 5], tiny)
    assert (by_ids.link, by_ids.parent_id) == (Link.EXTENDS, call.call_id)
    rebuilt = MessageGraph(HASHER, [part(call)])
    assert rebuilt.place_prompt("Once upon a time there", tiny).parent_id == call.call_id
    assert rebuilt.place_prompt("Once upon", tiny).link is Link.SIBLING


def _prompted(talk: Talk, place: Placement, prompt: str, reply: str) -> Call:
    sampled = np.asarray(talk.renderer.encode(reply), np.int32)
    call = Call(
        call_id=new_id("call"),
        session_id="s",
        run_id="r",
        agent_id="a",
        policy_id="p",
        request_id=new_id("req"),
        prompt_ids=place.prompt_ids,
        sampled_ids=sampled,
        logprobs=np.zeros(len(sampled), np.float32),
        versions=np.zeros(len(sampled), np.int32),
        messages=(user(prompt),),
        reply=Message(role="assistant", content=reply),
        finish_reason="stop",
        digests=HASHER.pack_prompt(prompt, reply),
    )
    talk.graph.add(call, place, None)
    return call


def test_aborted_calls_do_not_count_as_finished(tiny: TemplateRenderer) -> None:
    talk = Talk(tiny)
    talk.say([user("one")], talk.ids("tw"), status=CallStatus.ABORTED)
    assert talk.graph.finished_requests == 0
    assert talk.graph.find_recorded(talk.place([user("one")]).key) == []


def test_memory_is_linear_in_turns(tiny: TemplateRenderer) -> None:
    talk = Talk(tiny)
    messages = [user("go")]
    for _ in range(60):
        call = talk.say(messages, talk.ids("some words to say"))
        messages = [*messages, call.reply, user("and then some more")]
    nodes = talk.graph._nodes.values()
    assert sum(len(node.prompt) + len(node.sampled) for node in nodes) == len(talk.calls[-1].sequence)
    assert sum(len(node.exact) for node in nodes) == len(messages) - 1
