"""A gateway with a scripted engine that replies in the format of a model family."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fidelity_parts.families import Family

from instar.config import GatewayConfig, ModelConfig, ScriptedEngineConfig
from instar.engines.scripted import ScriptedEngine
from instar.gateway.app import create_app
from instar.gateway.auth import create_key, new_key
from instar.gateway.base import OpenSession
from instar.gateway.serve import bind, serve
from instar.models import load_tokenizer
from instar.record.render import load_renderer
from instar.rollout.gateway_client import GatewayClient
from instar.store.sqlite import SqliteStore
from instar.types import Channel

RUN = "fidelity"
MAX_CONTEXT = 200_000


@dataclass(frozen=True)
class AgentEndpoint:
    """An agent's URL and key. If a session was opened for the agent, ``session_id`` is set; if it is a live
    agent, ``agent_id`` is set."""

    url: str
    """The base URL without ``/v1``."""
    key: str
    agent_id: str = ""
    session_id: str = ""


@dataclass
class FidelityGateway:
    url: str
    store: SqliteStore
    decode: Callable[[list[int]], str]
    _client: GatewayClient

    async def open_session(self) -> AgentEndpoint:
        session = await self._client.open_session(OpenSession(channel=Channel.TRAIN))
        return AgentEndpoint(
            session.base_url.removesuffix("/v1"), session.api_key, session_id=session.session_id
        )

    async def create_live_agent(self, agent_id: str) -> AgentEndpoint:
        """Create an agent with its own key and return its endpoint."""
        return AgentEndpoint(self.url, await create_key(self.store, "agent", agent_id, agent_id), agent_id)


@asynccontextmanager
async def run_gateway(family: Family, script: str, store_path: Path) -> AsyncGenerator[FidelityGateway]:
    """Run a gateway whose engine replies with the function named by ``script``."""
    folder = family.download_tokenizer()
    model = ModelConfig(name=str(folder), max_context=MAX_CONTEXT)
    engine = ScriptedEngine(model, ScriptedEngineConfig(function=script))
    store = SqliteStore(store_path)
    admin_key = new_key()
    app = create_app(
        store=store,
        engine=engine,
        renderer=load_renderer(folder, ModelConfig(name=family.model, max_context=MAX_CONTEXT)),
        run_id=RUN,
        agent_id="agent",
        policy_id=RUN,
        config=GatewayConfig(),
        admin_key=admin_key,
    )
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    stop = asyncio.Event()
    server = asyncio.create_task(serve(app, listener, stop=stop, grace=1))
    client = GatewayClient(url, admin_key)
    try:
        yield FidelityGateway(url, store, load_tokenizer(folder).decode, client)
    finally:
        await client.close()
        stop.set()
        await server
        await engine.close()
        await store.close()
