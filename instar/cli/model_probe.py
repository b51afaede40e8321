"""Hold a conversation with tool calls in a model's own format, and measure how much of it is exact.

The conversation has parallel calls, reasoning, compact and unusually spaced JSON, and text outside of ASCII.
The replies are written like the model's chat template writes them, or by ``write_reply``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from instar.data.linearize import linearize
from instar.errors import RenderError
from instar.record.base import Renderer
from instar.record.graph import MessageGraph
from instar.record.hashing import MessageHasher
from instar.record.render import TemplateRenderer
from instar.record.stream import TokenDecoder
from instar.types import Call, Channel, Link, Message, Session, Tool, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ProbeCall = tuple[str, str]
"""The name of a tool and its arguments as JSON text."""
WriteReply = Callable[[str, str, Sequence[ProbeCall]], str]
"""A function that returns a reply to a prompt with this text and these calls."""
REASONING = "Hmm, é 🙂."
_TAIL_TOKENS = 3
"""The number of tokens at the end of a prompt by which the start of a reply is found."""
STEPS: tuple[tuple[str, tuple[ProbeCall, ...]], ...] = (
    (
        "Let me see – 日本 🙂.",
        (
            ("search", '{"text":"é 🙂 \\u00e9 \\"x\\"","count":3}'),
            ("search", '{ "count" :  7,\t"text": "a  b\\n<b>c</b>" }'),
        ),
    ),
    ("", (("fetch", '{"text":"ü","count":0}'),)),
    ("It is “3”.", ()),
    ("It is “4”.", ()),
)
"""The text and the calls of each reply. The last two follow a result and a message of the user."""
PARAMETERS = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["text"],
}
TOOLS = tuple(Tool(name=name, description="A tool.", parameters=PARAMETERS) for name in ("search", "fetch"))


@dataclass(frozen=True)
class ProbeResult:
    linked: float
    """The fraction of follow-up calls that were recorded as continuations of the call before them."""
    trained: float
    """The fraction of sampled tokens that the masks of the training samples include."""
    exact_possible: float
    """The fraction of follow-up calls whose prompt starts with all tokens of the call before it. Those in
    which the format itself rewrites the history are not counted."""
    rewritten: int
    """The number of calls in which the format itself rewrites the history, like by dropping reasoning."""
    problem: str | None = None
    """Why the conversation could not be held to its end, or None."""

    @property
    def is_exact(self) -> bool:
        return self.problem is None and self.linked == self.trained == self.exact_possible == 1


def hold_probe(
    renderer: Renderer, tokenizer: PreTrainedTokenizerFast, write_reply: WriteReply | None = None
) -> ProbeResult:
    conversation = _Conversation(renderer, tokenizer, write_reply)
    try:
        calls = list(conversation.hold())
    except RenderError as error:
        return ProbeResult(0, 0, 0, 0, str(error))
    session = Session("probe", "probe", "probe", "probe", Channel.TRAIN)
    trained = sum(sample.trained_tokens for sample in linearize(session, calls))
    sampled = sum(len(call.sampled_ids) for call in calls)
    linked = exact = rewritten = 0
    for parent, call in pairwise(calls):
        is_exact = call.link is Link.EXTENDS and _starts_with(call.prompt_ids, parent.sequence)
        exact += is_exact
        rewritten += not is_exact and conversation.is_rewritten(parent, call)
        linked += parent.call_id in (call.parent_id, call.base_id)
    followups = len(STEPS) - 1
    return ProbeResult(linked / followups, trained / sampled, exact / (followups - rewritten), rewritten)


class _Conversation:
    def __init__(
        self, renderer: Renderer, tokenizer: PreTrainedTokenizerFast, write_reply: WriteReply | None
    ) -> None:
        self._renderer = renderer
        self._eos_id = tokenizer.eos_token_id
        self._decode = TokenDecoder(tokenizer.backend_tokenizer)
        self._marker_ids = frozenset(tokenizer.added_tokens_decoder)
        self._write_reply = write_reply

    def hold(self) -> Iterator[Call]:
        """Yield the recorded calls. Raises RenderError if the model's format does not allow a reply."""
        hasher = MessageHasher()
        graph = MessageGraph(hasher)
        messages = [Message(role="system", content="Be kind."), Message(role="user", content="step-1")]
        for step, (text, probe_calls) in enumerate(STEPS, start=1):
            chain = graph.match_replies(hasher.hash_messages(messages, TOOLS), messages)
            placement = graph.place(chain, messages, TOOLS, self._renderer)
            prompt: list[int] = placement.prompt_ids.tolist()
            if self._write_reply is None:
                ids = self._choose_reply(messages, prompt, text, probe_calls)
            else:
                ids = self._encode(self._write_reply(self._decode(prompt), text, probe_calls))
            reply = self._renderer.parse(ids, TOOLS, prompt_ids=prompt)
            tool_calls = reply.get("tool_calls", [])
            if not _has_calls(reply, probe_calls[: len(tool_calls) or len(probe_calls)]):
                raise RenderError(f"a reply with calls in the model's own format is read back as {reply}")
            call = Call(
                call_id=str(step), session_id="probe", run_id="probe", agent_id="probe", policy_id="probe",
                request_id=str(step), prompt_ids=placement.prompt_ids, sampled_ids=np.array(ids, np.int32),
                logprobs=np.full(len(ids), -1, np.float32), versions=np.zeros(len(ids), np.int32),
                messages=tuple(messages), reply=reply, finish_reason="stop", tools=TOOLS,
                parent_id=placement.parent_id, link=placement.link, base_id=placement.base_id,
                base_tokens=placement.base_tokens, base_messages=placement.base_messages,
            )  # fmt: skip
            graph.add(call, placement, chain.extend([hasher.hash_message(reply)]))
            yield call
            # Like most agents, this one does not send the reasoning back.
            sent = Message(role="assistant", content=reply["content"])
            if tool_calls:
                sent["tool_calls"] = tool_calls
            messages = [*messages, sent, *_answer(step + 1, tool_calls)]

    def _choose_reply(
        self, messages: list[Message], prompt: list[int], text: str, probe_calls: Sequence[ProbeCall]
    ) -> list[int]:
        """Return the tokens of the first variant that is read back as it was meant. The best variants have
        reasoning, all calls, and arguments whose spelling differs from that of the template."""
        counts = range(len(probe_calls), 0, -1) if probe_calls else (0,)
        for count, has_reasoning in product(counts, (True, False)):
            calls = probe_calls[:count]
            variants = self._write_variants(messages, prompt, text, calls, has_reasoning)
            for variant, keeps_spelling in product(list(variants), (True, False)):
                ids = self._encode(_respell(variant, calls) if keeps_spelling else variant)
                reply = self._renderer.parse(ids, TOOLS, prompt_ids=prompt)
                content = reply["content"].strip()
                has_text = content == text or (bool(calls) and not content)
                if has_text and bool(reply.get("reasoning")) == has_reasoning and _has_calls(reply, calls):
                    return ids
        raise RenderError("no reply in the format of the chat template is read back as it was meant")

    def _write_variants(
        self,
        messages: list[Message],
        prompt: list[int],
        text: str,
        calls: Sequence[ProbeCall],
        has_reasoning: bool,
    ) -> Iterator[str]:
        """Yield texts of the reply as the chat template writes it, with reasoning that it writes or omits."""
        reply = Message(role="assistant", content=text)
        if calls:
            reply["tool_calls"] = [
                ToolCall(id=f"call{i:05}", name=name, arguments=arguments)
                for i, (name, arguments) in enumerate(calls)
            ]
        plain = self._render_reply(messages, reply)
        if not has_reasoning:
            yield from filter(None, [plain, text])
        elif isinstance(self._renderer, TemplateRenderer) and self._renderer.can_reason:
            with_reasoning = self._render_reply(messages, cast(Message, {**reply, "reasoning": REASONING}))
            begin, end = self._renderer.reasoning_format.begin, self._renderer.reasoning_format.end
            if self._renderer.ends_in_reasoning(prompt):
                begin = ""
            yield from filter(None, [with_reasoning])
            for answer in filter(None, [plain, text]):
                yield f"{begin}{REASONING}{end}{answer.rpartition(end)[2]}"

    def _render_reply(self, messages: list[Message], reply: Message) -> str | None:
        """Return the text between the prompt and the stop token, or None if the template rejects it."""
        tool_calls = reply.get("tool_calls", [])
        try:
            longer = self._renderer.render([*messages, reply, *_answer(0, tool_calls)], TOOLS)
            prompt = self._renderer.render(messages, TOOLS)
        except RenderError:
            return None
        start = next((i for i, (a, b) in enumerate(zip(prompt, longer, strict=False)) if a != b), len(prompt))
        # Templates may write earlier messages differently if a reply follows. The end of the prompt then
        # shows where the reply starts; it also ends the longer prompt.
        tail = prompt[-_TAIL_TOKENS:]
        starts = [i for i in range(start, len(longer)) if longer[i - _TAIL_TOKENS : i] == tail]
        start = start if longer[start - _TAIL_TOKENS : start] == tail or not starts else starts[-1]
        stop_ids = self._renderer.stop_token_ids
        end = next((i for i in range(start, len(longer)) if longer[i] in stop_ids), len(longer))
        text = self._decode(longer[start:end])
        # The history may have another token after a reply than the reply itself, or none.
        last = reply["content"]
        if tool_calls:
            last = self._renderer.tool_format.end if isinstance(self._renderer, TemplateRenderer) else ""
        return text[: text.rfind(last) + len(last)] if last and last in text else text

    def is_rewritten(self, parent: Call, call: Call) -> bool:
        """Return True if the chat template itself changes the history after a new message of the user: it
        drops reasoning, or moves or changes other parts. The spelling of calls is not compared."""
        if call.messages[-1]["role"] != "user":
            return False
        messages = [*parent.messages, parent.reply, *call.messages[len(parent.messages) + 1 :]]
        prompt, longer = (self._renderer.render(part, TOOLS) for part in (parent.messages, messages))
        markers, longer_markers = map(self._list_markers, (parent.sequence[:-1].tolist(), longer))
        is_same = _starts_with(longer, prompt) and _starts_with(longer_markers, markers)
        return not is_same or parent.reply.get("reasoning", "").strip() not in self._decode(longer)

    def _list_markers(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in self._marker_ids]

    def _encode(self, text: str) -> list[int]:
        """Return the tokens of a reply up to its stop token, which is added if there is none."""
        stop_ids, ids = self._renderer.stop_token_ids, self._renderer.encode(text)
        end = next((i for i, token in enumerate(ids) if token in stop_ids), len(ids))
        stop_id = self._eos_id if self._eos_id in stop_ids else stop_ids[0]
        return ids[: end + 1] if end < len(ids) else [*ids, stop_id]


def _answer(step: int, tool_calls: Sequence[ToolCall]) -> list[Message]:
    """Return the results of the calls, or a message of the user if there is no call."""
    if not tool_calls:
        return [Message(role="user", content=f"step-{step}; and now?")]
    return [
        Message(role="tool", tool_call_id=call["id"], content=f"step-{step} result é {i}")
        for i, call in enumerate(tool_calls)
    ]


def _respell(text: str, calls: Sequence[ProbeCall]) -> str:
    for _, arguments in calls:
        value: Any = json.loads(arguments)
        for is_ascii, separators in product((False, True), (None, (",", ":"))):
            spelled = json.dumps(value, ensure_ascii=is_ascii, separators=separators)
            text = text.replace(spelled, arguments)
    return text


def _has_calls(reply: Message, calls: Sequence[ProbeCall]) -> bool:
    actual = [(call["name"], json.loads(call["arguments"])) for call in reply.get("tool_calls", [])]
    return actual == [(name, json.loads(arguments)) for name, arguments in calls]


def _starts_with(ids: Any, prefix: Any) -> bool:
    return np.array_equal(ids[: len(prefix)], prefix)
