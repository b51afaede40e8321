from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import LlamaConfig

from instar.config import GatewayConfig, ModelConfig, RunConfig, SamplingConfig, ScriptedEngineConfig
from instar.engines.base import Engine
from instar.engines.scripted import ScriptedEngine
from instar.gateway.app import create_app, create_group_options
from instar.gateway.base import OpenedSession
from instar.gateway.forgetting import RetentionPolicy
from instar.gateway.live_policies import LiveOptions
from instar.gateway.serve import bind, serve
from instar.live.activity import ActivityRecorder
from instar.record.base import Renderer
from instar.record.render import load_renderer
from instar.rollout.admission import Admission
from instar.store.sqlite import SqliteStore
from instar.types import Call
from tests.tiny import make_tiny_tokenizer

ADMIN_KEY = "sk-instar-test-admin"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """A model without weights: the renderer and the scripted engine only need a tokenizer and a config."""
    folder = tmp_path_factory.mktemp("model")
    make_tiny_tokenizer().save_pretrained(folder)
    LlamaConfig().save_pretrained(folder)
    return ModelConfig(name=str(folder), max_context=1024)


@pytest.fixture(scope="session")
def renderer(model: ModelConfig) -> Renderer:
    return load_renderer(Path(model.name), model)


@dataclass
class RunningGateway:
    """A gateway that listens on a real socket."""

    url: str
    store_path: Path
    store: SqliteStore
    engine: Engine | None
    http: httpx.AsyncClient

    async def open_session(self, **fields: Any) -> OpenedSession:
        response = await self.post_json("/sessions", fields)
        assert response.status_code == 201, response.text
        return OpenedSession(**response.json())

    async def post_json(self, path: str, body: Any, key: str = ADMIN_KEY) -> httpx.Response:
        return await self.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})

    def openai_client(self, session: OpenedSession, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=session.base_url, api_key=session.api_key, **{"max_retries": 0, **options}
        )

    async def calls(self, session: OpenedSession) -> list[Call]:
        return await self.store.calls(session.session_id)


StartGateway = Callable[..., Awaitable[RunningGateway]]


@asynccontextmanager
async def run_gateway(
    store_path: Path,
    engine: Engine | None,
    renderer: Renderer | None,
    config: GatewayConfig,
    store_class: type[SqliteStore] = SqliteStore,
    run_config: RunConfig | None = None,
    activity: ActivityRecorder | None = None,
    **options: Any,
) -> AsyncGenerator[RunningGateway]:
    store = store_class(store_path)
    groups = None
    if run_config is not None:
        groups = create_group_options(run_config, Admission(run_config, store, "run"))
    app = create_app(
        store=store,
        engine=engine,
        renderer=renderer,
        run_id="run",
        agent_id="agent",
        policy_id="policy",
        config=config,
        admin_key=ADMIN_KEY,
        groups=groups,
        **options,
    )
    if activity is not None:
        app.announce_requests(activity)
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    stop = asyncio.Event()
    server = asyncio.create_task(serve(app, listener, stop=stop, grace=1, reject_early=app.reject_early))
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            yield RunningGateway(url, store_path, store, engine, http)
    finally:
        stop.set()
        await server
        await store.close()


@pytest.fixture
async def start_gateway(
    tmp_path: Path, model: ModelConfig, renderer: Renderer
) -> AsyncGenerator[StartGateway]:
    """A function that starts a gateway, which is stopped after the test."""
    contexts: list[Any] = []

    async def start(
        engine: Engine | None = None,
        config: GatewayConfig | None = None,
        delay: float = 0.0,
        sampling: SamplingConfig | None = None,
        store_class: type[SqliteStore] = SqliteStore,
        run_config: RunConfig | None = None,
        retention: RetentionPolicy | None = None,
        activity: ActivityRecorder | None = None,
        live: LiveOptions | None = None,
        agent_policies: Mapping[str, str] | None = None,
    ) -> RunningGateway:
        """Start a gateway. With ``run_config``, it accepts groups from outside if that config allows it."""
        script = ScriptedEngineConfig(function="tests.unit.gateway.scripts:reply", delay=delay)
        context = run_gateway(
            tmp_path / "store.db",
            engine or ScriptedEngine(model, script),
            renderer,
            config or GatewayConfig(),
            store_class,
            train_sampling=sampling,
            run_config=run_config,
            retention=retention,
            activity=activity,
            live=live,
            agent_policies=agent_policies,
        )
        contexts.append(context)
        return await context.__aenter__()

    yield start
    for context in reversed(contexts):
        await context.__aexit__(None, None, None)


@pytest.fixture
async def gateway(start_gateway: StartGateway) -> RunningGateway:
    return await start_gateway()
