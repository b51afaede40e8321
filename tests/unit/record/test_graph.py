"""Placement of calls in a session's message graph."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest

from instar.record.base import Placement, Renderer
from instar.record.graph import MessageGraph
from instar.record.hashing import HashChain, MessageHasher
from instar.record.render import TemplateRenderer
from instar.store.base import CallDelta
from instar.types import Call, CallStatus, Link, Message, Tool, ToolCall, new_id
from tests.unit.record.conftest import LoadTemplate
from tests.unit.record.conversations import CALC, echo_reply, make_follow_up, make_reply_text, make_words
from tests.unit.record.test_render import NUMBERING_TEMPLATE

HASHER = MessageHasher(b"key")


def user(text: str) -> Message:
    return Message(role="user", content=text)


class GraphSession:
    """Places calls in a graph and adds them, as the gateway does."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.graph = MessageGraph(HASHER)
        self.calls: list[Call] = []

    def place(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Placement:
        placement = self.graph.place(self.hash_messages(messages, tools), messages, tools, self.renderer)
        self.graph.release(placement)
        return placement

    def hash_messages(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> HashChain:
        return self.graph.match_replies(HASHER.hash_messages(messages, tools), messages)

    def add_call(
        self,
        messages: Sequence[Message],
        sampled: list[int],
        tools: Sequence[Tool] = (),
        status: CallStatus = CallStatus.OK,
    ) -> Call:
        placement, chain = self.place(messages, tools), self.hash_messages(messages, tools)
        reply = self.renderer.parse(sampled, tools)
        reply_chain = chain.extend([HASHER.hash_message(reply)])
        call = Call(
            call_id=new_id("call"),
            session_id="s",
            run_id="r",
            agent_id="a",
            policy_id="p",
            request_id=new_id("req"),
            prompt_ids=placement.prompt_ids,
            sampled_ids=np.asarray(sampled, np.int32),
            logprobs=np.zeros(len(sampled), np.float32),
            versions=np.zeros(len(sampled), np.int32),
            messages=tuple(messages),
            reply=reply,
            finish_reason="stop",
            tools=tuple(tools),
            parent_id=placement.parent_id,
            link=placement.link,
            base_id=placement.base_id,
            base_tokens=placement.base_tokens,
            base_messages=placement.base_messages,
            status=status,
            digests=reply_chain.pack(placement.base_messages),
        )
        self.check_base(call)
        self.graph.add(call, placement, reply_chain)
        self.calls.append(call)
        return call

    def check_base(self, call: Call) -> None:
        """Check that the call starts with the tokens and messages that it takes from its base."""
        if call.base_id is None:
            assert (call.base_tokens, call.base_messages) == (0, 0)
            return
        base = next(other for other in self.calls if other.call_id == call.base_id)
        assert np.array_equal(base.sequence[: call.base_tokens], call.prompt_ids[: call.base_tokens])
        assert [*base.messages, base.reply][: call.base_messages] == list(call.messages[: call.base_messages])

    def encode_reply(self, text: str) -> list[int]:
        assert isinstance(self.renderer, TemplateRenderer)
        return [*self.renderer.encode(text), self.renderer.stop_token_ids[0]]


def test_random_sessions_extend_the_recorded_tokens(tiny_renderer: TemplateRenderer) -> None:
    rng = random.Random(3)
    for _ in range(60):
        session = GraphSession(tiny_renderer)
        messages = [user(make_words(rng))]
        tools = [CALC] if rng.random() < 0.8 else []
        parent: Call | None = None
        for _ in range(rng.randint(2, 6)):
            call = session.add_call(messages, session.encode_reply(make_reply_text(rng)), tools)
            assert call.link is (Link.EXTENDS if parent else Link.ROOT)
            if parent:
                assert call.parent_id == parent.call_id
                assert np.array_equal(call.prompt_ids[: len(parent.sequence)], parent.sequence)
                assert call.base_messages >= len(parent.messages)
            parent = call
            messages = [*messages, echo_reply(rng, call.reply), *make_follow_up(rng, call.reply)]


def test_rewritten_history_is_a_branch_that_shares_its_prefix(tiny_renderer: TemplateRenderer) -> None:
    session = GraphSession(tiny_renderer)
    system = Message(role="system", content="You are careful, and this is long enough to share.")
    first = session.add_call([system, user("one")], session.encode_reply("two"))
    second = session.add_call([system, user("one"), first.reply, user("three")], session.encode_reply("four"))
    rewritten = [system, user("one"), Message(role="assistant", content="summary"), user("five")]
    branch = session.add_call(rewritten, session.encode_reply("six"))
    assert branch.link is Link.BRANCH
    assert branch.parent_id is None
    assert branch.base_messages == 2
    assert branch.base_tokens >= len(tiny_renderer.render([system])) - 4
    continued = session.add_call([*rewritten, branch.reply, user("seven")], session.encode_reply("eight"))
    assert (continued.link, continued.parent_id) == (Link.EXTENDS, branch.call_id)
    old_branch = session.add_call([*second.messages, second.reply, user("nine")], session.encode_reply("ten"))
    assert (old_branch.link, old_branch.parent_id) == (Link.EXTENDS, second.call_id)


def test_user_text_is_compared_exactly(tiny_renderer: TemplateRenderer) -> None:
    session = GraphSession(tiny_renderer)
    first = session.add_call([user("one")], session.encode_reply("two"))
    assert session.place([user("one "), first.reply, user("x")]).link is Link.BRANCH


def test_repeated_messages_are_a_sibling(tiny_renderer: TemplateRenderer) -> None:
    session = GraphSession(tiny_renderer)
    root = session.add_call([user("one")], session.encode_reply("two"))
    child = session.add_call([user("one"), root.reply, user("x")], session.encode_reply("three"))
    repeated = session.add_call([user("one"), root.reply, user("x")], session.encode_reply("four"))
    assert (repeated.link, repeated.parent_id, repeated.base_id) == (
        Link.SIBLING,
        root.call_id,
        child.call_id,
    )
    assert np.array_equal(repeated.prompt_ids, child.prompt_ids)
    assert session.graph.find_recorded(session.place([user("one")]).key) == [root.call_id]


def test_prompt_after_an_empty_reply_excludes_the_earlier_reply(tiny_renderer: TemplateRenderer) -> None:
    session = GraphSession(tiny_renderer)
    first = session.add_call([user("a")], [5, 6, 7])
    empty = session.add_call([user("a")], [], status=CallStatus.ABORTED)
    assert empty.base_tokens == len(first.prompt_ids)
    assert session.place([user("a")]).prompt_ids.tolist() == first.prompt_ids.tolist()


def test_identical_requests_in_flight_are_siblings(tiny_renderer: TemplateRenderer) -> None:
    graph, chain = MessageGraph(HASHER), HASHER.hash_messages([user("one")])
    first, second = [graph.register(graph.place(chain, [user("one")], (), tiny_renderer)) for _ in range(2)]
    assert (first.link, second.link) == (Link.ROOT, Link.SIBLING)
    graph.release(first)
    graph.release(second)
    assert graph.register(graph.place(chain, [user("one")], (), tiny_renderer)).link is Link.ROOT


def test_parent_has_the_same_call_ids_or_is_the_newest(tiny_renderer: TemplateRenderer) -> None:
    session = GraphSession(tiny_renderer)
    text = '<tool_call>{"name": "calc", "arguments": {"expression": "1"}}</tool_call>'
    old = session.add_call([user("one")], session.encode_reply(text), [CALC])
    new = session.add_call([user("one")], session.encode_reply(text), [CALC])
    result = Message(role="tool", content="1")
    assert session.place([user("one"), old.reply, result], [CALC]).parent_id == old.call_id
    with_different_id = Message(role="assistant", content="", tool_calls=[_change_call_id(new)])
    assert session.place([user("one"), with_different_id, result], [CALC]).parent_id == new.call_id


def _change_call_id(call: Call) -> ToolCall:
    """Return the call's only tool call with a different id and reformatted arguments."""
    (tool_call,) = call.reply.get("tool_calls", ())
    return ToolCall(id="x", name=tool_call["name"], arguments='{ "expression" : "1" }')


def test_changed_tools_are_a_branch(tiny_renderer: TemplateRenderer) -> None:
    session = GraphSession(tiny_renderer)
    first = session.add_call([user("one")], session.encode_reply("two"), [CALC])
    assert session.place([user("one"), first.reply, user("x")], []).link is Link.BRANCH


def test_call_with_unbridged_template_is_a_branch(load_template: LoadTemplate) -> None:
    session = GraphSession(load_template(NUMBERING_TEMPLATE))
    first = session.add_call([user("one")], session.encode_reply("two"))
    assert (
        session.add_call([user("one"), first.reply, user("x")], session.encode_reply("y")).link is Link.BRANCH
    )


def to_delta(call: Call, *, with_digests: bool = True) -> CallDelta:
    """Return the call as the store would load it."""
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
        digests=call.digests if with_digests else b"",
        reply=call.reply,
        messages=() if with_digests else call.messages[call.base_messages :],
        tools=() if with_digests else call.tools,
    )


@pytest.mark.parametrize("with_digests", [True, False])
def test_restored_graph_gives_the_same_placements(
    tiny_renderer: TemplateRenderer, with_digests: bool
) -> None:
    rng = random.Random(4)
    session = GraphSession(tiny_renderer)
    messages = [user("go")]
    for _ in range(8):
        call = session.add_call(messages, session.encode_reply(make_reply_text(rng)), [CALC])
        messages = [*messages, echo_reply(rng, call.reply), *make_follow_up(rng, call.reply)]
        if rng.random() < 0.3:
            session.add_call([user("other"), user(make_words(rng))], session.encode_reply("fine"), [CALC])
    rebuilt = MessageGraph(HASHER, [to_delta(call, with_digests=with_digests) for call in session.calls])
    expected = session.place(messages, [CALC])
    actual = rebuilt.place(session.hash_messages(messages, [CALC]), messages, [CALC], tiny_renderer)
    assert expected.link is Link.EXTENDS
    assert np.array_equal(expected.prompt_ids, actual.prompt_ids)
    assert (expected.parent_id, expected.base_tokens, expected.base_messages) == (
        actual.parent_id,
        actual.base_tokens,
        actual.base_messages,
    )
    assert rebuilt.successful_request_count == session.graph.successful_request_count == len(session.calls)


def test_reply_with_added_defaults_is_matched_by_call_ids(tiny_renderer: TemplateRenderer) -> None:
    session = GraphSession(tiny_renderer)
    text = '<tool_call>{"name": "calc", "arguments": {"expression": "1"}}</tool_call>'
    first = session.add_call([user("one")], session.encode_reply(text), [CALC])
    result = Message(role="tool", content="1")
    with_defaults = _change_arguments(first, '{"exact": false, "expression": "1"}')
    second = session.add_call([user("one"), with_defaults, result], session.encode_reply("two"), [CALC])
    assert (second.link, second.parent_id) == (Link.EXTENDS, first.call_id)
    third = session.place([user("one"), with_defaults, result, second.reply, user("x")], [CALC])
    assert (third.link, third.parent_id) == (Link.EXTENDS, second.call_id)
    rebuilt = MessageGraph(HASHER, map(to_delta, session.calls))
    request = [user("one"), with_defaults, result, second.reply, user("x")]
    chain = rebuilt.match_replies(HASHER.hash_messages(request, [CALC]), request)
    assert rebuilt.place(chain, request, [CALC], tiny_renderer).parent_id == second.call_id


def test_reply_with_a_changed_argument_is_a_branch(tiny_renderer: TemplateRenderer) -> None:
    session = GraphSession(tiny_renderer)
    text = '<tool_call>{"name": "calc", "arguments": {"expression": "1"}}</tool_call>'
    first = session.add_call([user("one")], session.encode_reply(text), [CALC])
    edited = _change_arguments(first, '{"expression": "2"}')
    result = Message(role="tool", content="1")
    assert session.place([user("one"), edited, result], [CALC]).link is Link.BRANCH


def test_reply_without_the_text_beside_its_tool_calls_is_matched_by_call_ids(
    tiny_renderer: TemplateRenderer,
) -> None:
    session = GraphSession(tiny_renderer)
    text = 'Let me see.\n<tool_call>{"name": "calc", "arguments": {"expression": "1"}}</tool_call>'
    first = session.add_call([user("one")], session.encode_reply(text), [CALC])
    without_text = _change_arguments(first, '{"expression": "1"}', content="")
    result = Message(role="tool", content="1")
    request = [user("one"), without_text, result]
    second = session.add_call(request, session.encode_reply("two"), [CALC])
    assert (second.link, second.parent_id) == (Link.EXTENDS, first.call_id)
    third = session.place([*request, second.reply, user("x")], [CALC])
    assert (third.link, third.parent_id) == (Link.EXTENDS, second.call_id)
    with_text = session.place([user("one"), first.reply, result, second.reply, user("x")], [CALC])
    assert (with_text.link, with_text.parent_id) == (Link.EXTENDS, second.call_id)


def test_reply_with_other_text_beside_its_tool_calls_is_a_branch(tiny_renderer: TemplateRenderer) -> None:
    session = GraphSession(tiny_renderer)
    text = 'Let me see.\n<tool_call>{"name": "calc", "arguments": {"expression": "1"}}</tool_call>'
    first = session.add_call([user("one")], session.encode_reply(text), [CALC])
    edited = _change_arguments(first, '{"expression": "1"}', content="Let me think.")
    result = Message(role="tool", content="1")
    assert session.place([user("one"), edited, result], [CALC]).link is Link.BRANCH


def _change_arguments(call: Call, arguments: str, content: str | None = None) -> Message:
    """Return the reply with different arguments, and different text if ``content`` is not None, and, as some
    agents send it, an id without hyphens."""
    (tool_call,) = call.reply.get("tool_calls", ())
    call_id = tool_call["id"].replace("-", "")
    return Message(
        role="assistant",
        content=call.reply["content"] if content is None else content,
        tool_calls=[ToolCall(id=call_id, name=tool_call["name"], arguments=arguments)],
    )


def test_prompts_without_messages_are_matched_by_text_or_tokens(tiny_renderer: TemplateRenderer) -> None:
    session = GraphSession(tiny_renderer)
    graph = session.graph
    first = graph.place_prompt("Once upon", tiny_renderer)
    graph.release(first)
    call = _add_prompt_call(session, first, "Once upon", " a time")
    by_text = graph.place_prompt("Once upon a time there", tiny_renderer)
    assert (by_text.link, by_text.parent_id) == (Link.EXTENDS, call.call_id)
    assert by_text.prompt_ids.tolist() == [*call.sequence.tolist(), *tiny_renderer.encode(" there")]
    by_ids = graph.place_prompt([*call.sequence.tolist(), 5], tiny_renderer)
    assert (by_ids.link, by_ids.parent_id) == (Link.EXTENDS, call.call_id)
    rebuilt = MessageGraph(HASHER, [to_delta(call)])
    assert rebuilt.place_prompt("Once upon a time there", tiny_renderer).parent_id == call.call_id
    assert rebuilt.place_prompt("Once upon", tiny_renderer).link is Link.SIBLING


def _add_prompt_call(session: GraphSession, placement: Placement, prompt: str, reply: str) -> Call:
    sampled = np.asarray(session.renderer.encode(reply), np.int32)
    call = Call(
        call_id=new_id("call"),
        session_id="s",
        run_id="r",
        agent_id="a",
        policy_id="p",
        request_id=new_id("req"),
        prompt_ids=placement.prompt_ids,
        sampled_ids=sampled,
        logprobs=np.zeros(len(sampled), np.float32),
        versions=np.zeros(len(sampled), np.int32),
        messages=(user(prompt),),
        reply=Message(role="assistant", content=reply),
        finish_reason="stop",
        digests=HASHER.pack_prompt_digest(prompt, reply),
    )
    session.graph.add(call, placement, None)
    return call


def test_graph_size_is_its_approximate_memory(tiny_renderer: TemplateRenderer) -> None:
    session = GraphSession(tiny_renderer)
    call = session.add_call([user(str(number)) for number in range(3000)], session.encode_reply("fine"))
    delta = to_delta(call)
    tracemalloc.start()
    graph = MessageGraph(HASHER, [delta])
    memory, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.7 < graph.size / (memory + delta.prompt_tail.nbytes) < 1.4
    assert graph.size == session.graph.size


def test_aborted_calls_do_not_count_as_successful(tiny_renderer: TemplateRenderer) -> None:
    session = GraphSession(tiny_renderer)
    session.add_call([user("one")], session.encode_reply("tw"), status=CallStatus.ABORTED)
    assert session.graph.successful_request_count == 0
    assert session.graph.find_recorded(session.place([user("one")]).key) == []


def test_graph_memory_is_linear_in_turns(tiny_renderer: TemplateRenderer) -> None:
    session = GraphSession(tiny_renderer)
    messages = [user("go")]
    for _ in range(60):
        call = session.add_call(messages, session.encode_reply("some words to say"))
        messages = [*messages, call.reply, user("and then some more")]
    nodes = session.graph._nodes.values()
    assert sum(len(node.prompt) + len(node.sampled) for node in nodes) == len(session.calls[-1].sequence)
    assert sum(len(node.exact) for node in nodes) == len(messages) - 1
