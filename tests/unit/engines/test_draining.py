"""Tests for draining: replies in progress finish and new requests go to other engines."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from instar.engines.pool import EnginePool
from instar.engines.remote import RemoteEngine
from instar.engines.server import DrainGate
from instar.errors import EngineUnavailable
from instar.types import SamplingParams
from tests.unit.engines.conformance import collect
from tests.unit.engines.test_conformance import create_scripted_engine, serve_engine

PROMPT = [5, 6, 7]


async def test_draining_engine_finishes_replies_and_rejects_new_requests(tiny_model: Path) -> None:
    gate = DrainGate()
    async with serve_engine(create_scripted_engine(tiny_model, delay=0.01), None, gate) as url:
        engine = await RemoteEngine.connect(url)
        async with aclosing(engine.generate(PROMPT, SamplingParams(max_tokens=40))) as reply:
            first = await anext(reply)
            gate.close()
            with pytest.raises(EngineUnavailable, match="being drained"):
                await collect(engine, PROMPT)
            assert (await engine.status()).draining
            assert not gate.drained.is_set()
            rest = [chunk async for chunk in reply]
        assert len(first.token_ids) + sum(len(chunk.token_ids) for chunk in rest) == 40
        assert rest[-1].finish_reason == "length"
        await asyncio.wait_for(gate.drained.wait(), 5)
        await engine.close()


async def test_pool_avoids_draining_engines(tiny_model: Path) -> None:
    gates = [DrainGate(), DrainGate()]
    async with (
        serve_engine(create_scripted_engine(tiny_model), None, gates[0]) as first_url,
        serve_engine(create_scripted_engine(tiny_model), None, gates[1]) as second_url,
    ):
        # The health check runs once a minute, so a rejected request must trigger one.
        pool = EnginePool([RemoteEngine(first_url), RemoteEngine(second_url)], check_interval=60)
        await pool.connect(10)
        gates[0].close()
        for session in range(6):
            assert (await collect(pool.for_session(f"s{session}"), PROMPT))[-1].finish_reason
        async with asyncio.timeout(10):
            while not pool.members[0].is_draining:  # noqa: ASYNC110 - health checks have no event
                await asyncio.sleep(0.01)
        assert [member.can_accept_requests for member in pool.members] == [False, True]
        requests_before = pool.members[0].total_requests
        assert (await collect(pool, PROMPT))[-1].finish_reason
        assert pool.members[0].total_requests == requests_before
        gates[1].close()
        pool.members[1].check_requested.set()
        async with asyncio.timeout(10):
            while pool.members[1].can_accept_requests:  # noqa: ASYNC110 - health checks have no event
                await asyncio.sleep(0.01)
        with pytest.raises(EngineUnavailable, match="engine 1: draining"):
            await collect(pool, PROMPT)
        await pool.close()


def test_drain_gate_is_drained_immediately_without_requests() -> None:
    gate = DrainGate()
    with gate.admit():
        pass
    assert not gate.drained.is_set(), "the gate is still open"
    gate.close()
    assert gate.drained.is_set()
