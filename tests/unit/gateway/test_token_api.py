"""Token-level requests, responses and submissions: parsing, formatting, and errors with their paths."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest

from instar.engines.base import EngineInfo
from instar.gateway.base import ApiError, bad_request
from instar.gateway.dialects.base import ReplyChoice
from instar.gateway.dialects.common import decode_body
from instar.gateway.dialects.tokens import TokensDialect
from instar.gateway.submissions import SubmissionBody, SubmittedCall, parse_submission
from instar.types import TokenChunk

DIALECT = TokensDialect()
VOCAB_SIZE = 100
LATEST_VERSION = 7
MAX_CONTEXT = 50
CALL = {
    "prompt_ids": [1, 2, 99],
    "sampled_ids": [3, 4],
    "logprobs": [-0.5, 0],
    "versions": [6, 7],
    "finish_reason": "stop",
}


def parse_calls(body: bytes) -> list[SubmittedCall]:
    calls = decode_body(msgspec.json.Decoder(SubmissionBody), body).calls
    info = EngineInfo("scripted", "m", VOCAB_SIZE, MAX_CONTEXT, artifacts=())
    return parse_submission(calls, info, LATEST_VERSION, max_calls=3)


def get_parse_error(body: bytes, *, is_submission: bool) -> ApiError:
    """Parse an invalid submission or generate request and return the error."""

    def parse() -> object:
        if is_submission:
            return parse_calls(body)
        return DIALECT.parse_request(body)

    with pytest.raises(ApiError) as caught:
        parse()
    assert caught.value.status == 400
    assert caught.value.message
    return caught.value


def test_generate_request_all_fields_are_parsed() -> None:
    body = {
        "prompt_ids": [1, 2, 99],
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "seed": 4,
        "stop": ["end"],
        "stop_token_ids": [9],
        "n": 2,
        "stream": True,
    }
    request = DIALECT.parse_request(json.dumps(body).encode())
    assert (request.prompt, request.n, request.stream, request.max_tokens) == ((1, 2, 99), 2, True, 5)
    assert (request.temperature, request.top_p, request.top_k, request.seed) == (0.5, 0.9, 3, 4)
    assert (request.stop, request.stop_token_ids) == (("end",), (9,))
    minimal = DIALECT.parse_request(b'{"prompt_ids":[1]}')
    assert (minimal.max_tokens, minimal.temperature, minimal.n) == (None, 1.0, 1)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt_ids": []}, "prompt_ids"),
        ({"prompt_ids": None}, "prompt_ids"),
        ({"prompt_ids": "text"}, "prompt_ids"),
        ({"prompt_ids": [1, -1]}, "prompt_ids[1]"),
        ({"prompt_ids": [1, 2**40]}, "prompt_ids[1]"),
        ({"prompt_ids": [1, 2**80]}, "prompt_ids[1]"),
        ({"prompt_ids": [1.5]}, "prompt_ids[0]"),
        ({"prompt_ids": [True]}, "prompt_ids[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop_token_ids": [1] * 257}, "stop_token_ids"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"min_p": -0.1}, "min_p"),
        ({"logit_bias": {"5": 200}}, "logit_bias.5"),
        ({"best_of": 1}, "best_of"),
    ],
)
def test_generate_request_invalid_value_error_names_its_path(change: dict[str, Any], param: str) -> None:
    body = {"prompt_ids": [1], **change}
    assert get_parse_error(json.dumps(body).encode(), is_submission=False).param == param


@pytest.mark.parametrize(
    "body", [b"", b"[", b'{"prompt_ids":[NaN]}', b"\xff\xfe", b"{}", b"[]", b"[" * 100_000]
)
@pytest.mark.parametrize("is_submission", [False, True])
def test_token_request_malformed_body_is_rejected(body: bytes, is_submission: bool) -> None:
    get_parse_error(body, is_submission=is_submission)


def test_generate_response_has_exact_tokens() -> None:
    tokens = TokenChunk([5], [math.nan], [3], behavior_logprobs=[-0.5], finish_reason="stop")
    choice = ReplyChoice({"role": "assistant", "content": "hi"}, "stop", 1, 1, tokens=tokens)
    request = DIALECT.parse_request(b'{"prompt_ids":[1]}')
    response = json.loads(DIALECT.format_response("gen-1", request, [choice]))
    assert response["id"] == "gen-1"
    assert response["choices"] == [
        {
            "index": 0,
            "token_ids": [5],
            "logprobs": [None],
            "versions": [3],
            "finish_reason": "stop",
            "text": "hi",
            "behavior_logprobs": [-0.5],
        }
    ]


def test_token_stream_sends_finish_reason_at_the_end_only() -> None:
    writer = DIALECT.stream_writer_class("gen-1", DIALECT.parse_request(b'{"prompt_ids":[1]}'))
    line = writer.write_tokens(1, TokenChunk([5, 6], [-1.0, -2.0], [3, 4], finish_reason="length"))
    assert line.endswith(b"\n")
    assert json.loads(line) == {
        "index": 1,
        "token_ids": [5, 6],
        "logprobs": [-1.0, -2.0],
        "versions": [3, 4],
    }
    choice = ReplyChoice({"role": "assistant", "content": "hi"}, "length", 1, 2)
    assert json.loads(writer.finish([choice])) == {
        "index": 0,
        "token_ids": [],
        "logprobs": [],
        "versions": [],
        "finish_reason": "length",
    }
    error = json.loads(writer.write_error(bad_request("invalid n", "n", "invalid")))["error"]
    assert error == {"message": "invalid n", "code": "invalid", "param": "n"}


def encode_submission(*calls: Any) -> bytes:
    return json.dumps({"calls": calls}).encode()


def test_submission_all_fields_are_parsed() -> None:
    full = {
        **CALL,
        "behavior_logprobs": [-0.25, None],
        "params": {"temperature": 0.5},
        "messages": [
            {"role": "system", "content": "s"},
            {
                "role": "assistant",
                "content": "",
                "reasoning": "r",
                "tool_calls": [{"id": "1", "name": "f", "arguments": "{}"}],
            },
            {"role": "tool", "content": "4", "tool_call_id": "1", "name": "f"},
        ],
        "tools": [{"name": "f", "parameters": {"type": "object"}}],
        "reply": {"role": "assistant", "content": "four"},
        "model": "m",
        "parent_id": "call-1",
        "client_key": "k",
    }
    minimal, call = parse_calls(encode_submission(CALL, full))
    assert (minimal.messages, minimal.body.reply) == (None, None)
    assert (minimal.body.parent_id, minimal.body.client_key) == (None, None)
    assert minimal.body.prompt_ids == [1, 2, 99]
    assert (minimal.reply.ids, minimal.reply.logprobs, minimal.reply.versions) == (
        [3, 4],
        [-0.5, 0.0],
        [6, 7],
    )
    assert (minimal.reply.finish_reason, minimal.reply.untrainable_reason) == ("stop", None)
    assert call.messages is not None
    assert list(call.messages) == full["messages"]
    assert call.tools == ({"name": "f", "description": "", "parameters": {"type": "object"}},)
    assert call.reply.message == full["reply"]
    assert (call.body.model, call.body.parent_id, call.body.client_key) == ("m", "call-1", "k")
    reason = "the sampling settings change the distribution, and behavior_logprobs are missing"
    assert call.reply.untrainable_reason == reason


@pytest.mark.parametrize("logprobs", [[-0.5, -1000.0], [-1000.0, None]])
def test_submission_with_an_implausible_logprob_is_not_trainable(logprobs: list[float | None]) -> None:
    # The importance ratio of such a token is infinite, so it would stop the training of every step.
    (call,) = parse_calls(encode_submission({**CALL, "logprobs": logprobs}))
    assert call.reply.untrainable_reason is not None
    (call,) = parse_calls(encode_submission({**CALL, "logprobs": [-30.0, 0.0]}))
    assert call.reply.untrainable_reason is None


def test_submission_without_a_logprob_is_not_trainable() -> None:
    (call,) = parse_calls(encode_submission({**CALL, "logprobs": [-0.5, None]}))
    assert math.isnan(call.reply.logprobs[1])
    assert call.reply.untrainable_reason == "logprobs are missing"


TOOL_CALL = {"id": "1", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt_ids": []}, "prompt_ids"),
        ({"prompt_ids": [100]}, "prompt_ids[0]"),
        ({"prompt_ids": [-1]}, "prompt_ids[0]"),
        ({"sampled_ids": []}, "sampled_ids"),
        ({"sampled_ids": [3, 100]}, "sampled_ids[1]"),
        ({"sampled_ids": [3, "4"]}, "sampled_ids[1]"),
        ({"sampled_ids": [3]}, "logprobs"),
        ({"logprobs": [-0.5]}, "logprobs"),
        ({"logprobs": None}, "logprobs"),
        ({"logprobs": [-0.5, 0.1]}, "logprobs[1]"),
        ({"logprobs": [-0.5, -1e300]}, "logprobs[1]"),
        ({"versions": [6]}, "versions"),
        ({"versions": [6, 8]}, "versions[1]"),
        ({"versions": [-1, 6]}, "versions[0]"),
        ({"behavior_logprobs": [-0.5]}, "behavior_logprobs"),
        ({"behavior_logprobs": [-0.5, 1]}, "behavior_logprobs[1]"),
        ({"behavior_logprobs": [-1e300, -1]}, "behavior_logprobs[0]"),
        ({"finish_reason": "unknown"}, "finish_reason"),
        ({"finish_reason": None}, "finish_reason"),
        ({"params": {"temperature": -1}}, "params.temperature"),
        ({"params": {"top_p": 0}}, "params.top_p"),
        ({"params": {"stop": [""]}}, "params.stop[0]"),
        ({"params": {"stop_token_ids": [100]}}, "params.stop_token_ids[0]"),
        ({"params": {"logit_bias": 1}}, "params.logit_bias"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "critic", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "", "extra": 1}]}, "messages[0].extra"),
        ({"messages": [{"role": "user", "content": "", "reasoning": "r"}]}, "messages[0].reasoning"),
        (
            {"messages": [{"role": "user", "content": "", "tool_calls": [TOOL_CALL]}]},
            "messages[0].tool_calls",
        ),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
        ({"reply": {"role": "user", "content": ""}}, "reply.role"),
        ({"reply": {"role": "assistant", "content": "", "tool_call_id": "1"}}, "reply.tool_call_id"),
        ({"tools": [{"description": "d"}]}, "tools[0].name"),
        ({"parent_id": 5}, "parent_id"),
        ({"client_key": "k" * 513}, "client_key"),
        ({"reward": 1}, "reward"),
    ],
)
def test_submission_invalid_value_error_names_its_path(change: dict[str, Any], param: str) -> None:
    body = encode_submission(CALL, {**CALL, **change})
    assert get_parse_error(body, is_submission=True).param == f"calls[1].{param}"


def test_submission_with_more_tokens_than_the_context_is_rejected() -> None:
    error = get_parse_error(encode_submission({**CALL, "prompt_ids": [1] * 49}), is_submission=True)
    assert error.param == "calls[0]"
    assert "51 tokens; at most 50" in error.message


def test_submission_with_too_few_or_too_many_calls_is_rejected() -> None:
    assert get_parse_error(encode_submission(), is_submission=True).param == "calls"
    assert get_parse_error(encode_submission(*[CALL] * 4), is_submission=True).param == "calls"
    assert len(parse_calls(encode_submission(*[CALL] * 3))) == 3
