"""Preferences between two replies over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from instar.gateway.auth import create_key
from instar.types import Call, Feedback
from tests.unit.gateway.conftest import RunningGateway
from tests.unit.gateway.test_feedback import (
    get_only_call,
    get_response_id,
    open_session_with_reply,
    post_feedback,
    send_feedback,
)
from tests.unit.gateway.test_redaction import SECRET, encode_text


async def open_call(gateway: RunningGateway, *texts: str) -> tuple[Any, Call]:
    session, response = await open_session_with_reply(gateway, *texts)
    return response, await get_only_call(gateway, session)


async def read_feedback(gateway: RunningGateway) -> Feedback:
    (feedback,) = [item for item in await gateway.store.feedback("run") if item.preferred is not None]
    return feedback


async def test_preference_between_two_replies_stores_the_other_reply(gateway: RunningGateway) -> None:
    _, call = await open_call(gateway)
    response, other = await open_call(gateway)
    key = await create_key(gateway.store, "feedback", "agent")
    view = await send_feedback(
        gateway, key, call_id=call.call_id, preferred="other", other_response_id=get_response_id(response)
    )
    assert (view["call_id"], view["other_call_id"]) == (call.call_id, other.call_id)
    assert (view["preferred"], view["trainable"], view["reward"]) == ("other", True, None)
    feedback = await read_feedback(gateway)
    assert feedback.other_ids is not None
    assert feedback.other_ids.tolist() == other.sampled_ids.tolist()


async def test_preference_over_a_text_stores_its_tokens(gateway: RunningGateway) -> None:
    _, call = await open_call(gateway)
    body = {"call_id": call.call_id, "preferred": "this", "other_text": "No.", "feedback_id": "f"}
    view = await send_feedback(gateway, **body)
    assert (view["other_text"], view["trainable"]) == ("No.", True)
    feedback = await read_feedback(gateway)
    assert feedback.other_ids is not None
    assert feedback.other_ids.tolist() == [*encode_text("No."), call.sampled_ids.tolist()[-1]]
    assert (await post_feedback(gateway, **body)).status_code == 200, "a retry"
    assert (await post_feedback(gateway, **{**body, "preferred": "other"})).status_code == 409


@pytest.mark.parametrize("text", ["No.", f"The key is {SECRET}."])
async def test_preference_with_different_prompts_or_a_secret_is_stored_but_not_trainable(
    gateway: RunningGateway, text: str
) -> None:
    _, call = await open_call(gateway)
    _, other = await open_call(gateway, "a different question")
    fields = {"other_call_id": other.call_id} if text == "No." else {"other_text": text}
    view = await send_feedback(gateway, call_id=call.call_id, preferred="this", **fields)
    expected = "different prompts" if text == "No." else "a secret was removed"
    assert not view["trainable"]
    assert expected in view["reason"]
    assert (await read_feedback(gateway)).other_ids is None


async def test_preference_from_an_agent_is_rejected(gateway: RunningGateway) -> None:
    session, _ = await open_session_with_reply(gateway)
    response = await post_feedback(gateway, session.api_key, preferred="this", other_text="No.")
    assert response.status_code == 403, response.text
    assert response.json()["error"]["param"] == "preferred"
    assert await gateway.store.feedback("run") == []


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"preferred": "this"}, "exactly one of other_call_id"),
        ({"thumbs": "up", "other_text": "No."}, "got 1 of them"),
        ({"preferred": "this", "other_text": "a", "other_call_id": "b"}, "got 2 of them"),
        ({"preferred": "this", "other_text": "a", "correction": "b"}, "not both"),
        ({"preferred": "this", "other_call_id": "missing"}, "There is no reply 'missing'"),
    ],
)
async def test_contradictory_preference_is_rejected(
    gateway: RunningGateway, fields: dict[str, Any], problem: str
) -> None:
    _, call = await open_call(gateway)
    response = await post_feedback(gateway, call_id=call.call_id, **fields)
    assert response.status_code in (400, 404)
    assert problem in response.text


async def test_preference_of_a_reply_over_itself_is_rejected(gateway: RunningGateway) -> None:
    _, call = await open_call(gateway)
    response = await post_feedback(
        gateway, call_id=call.call_id, preferred="this", other_call_id=call.call_id
    )
    assert response.status_code == 400
    assert "compared with itself" in response.text
