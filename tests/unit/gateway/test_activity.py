"""Tests that the gateway announces live requests, for which training pauses."""

from __future__ import annotations

import asyncio
from pathlib import Path

from instar.live.activity import ActivityReader, ActivityRecorder
from instar.rewards.base import JUDGE_AGENT
from tests.unit.gateway.conftest import RunningGateway, StartGateway

BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


async def request_and_watch(
    gateway: RunningGateway, reader: ActivityReader, model: str = "m", **session: object
) -> list[bool]:
    """Send a request. Return whether the reader saw a request in progress, each time that it looked."""
    opened = await gateway.open_session(**session)
    body = {**BODY, "model": model}
    request = asyncio.create_task(gateway.post_json("/v1/chat/completions", body, opened.api_key))
    states: list[bool] = []
    while not request.done():
        states.append(reader.read()[0])
        await asyncio.sleep(0.01)
    assert (await request).status_code == 200
    return [*states, reader.read()[0]]


async def test_gateway_announces_a_live_request_until_it_ends(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    path = tmp_path / "activity"
    gateway = await start_gateway(delay=0.3, activity=ActivityRecorder(path))
    states = await request_and_watch(gateway, ActivityReader(path))
    assert True in states
    assert not states[-1]


async def test_gateway_does_not_announce_rollouts_and_judges(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    path = tmp_path / "activity"
    gateway = await start_gateway(delay=0.1, activity=ActivityRecorder(path))
    assert True not in await request_and_watch(gateway, ActivityReader(path), channel="train")
    assert True not in await request_and_watch(gateway, ActivityReader(path), model=JUDGE_AGENT)


async def test_gateway_announces_the_end_of_a_request_whose_client_disconnects(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    path = tmp_path / "activity"
    reader = ActivityReader(path)
    gateway = await start_gateway(delay=60, activity=ActivityRecorder(path))
    opened = await gateway.open_session()
    body = {**BODY, "model": "m"}
    request = asyncio.create_task(gateway.post_json("/v1/chat/completions", body, opened.api_key))
    while not reader.read()[0]:  # noqa: ASYNC110 - the file has no events
        await asyncio.sleep(0.01)
    request.cancel()
    while reader.read()[0]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
