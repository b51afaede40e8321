"""A gateway from a run's config."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

from starlette.applications import Starlette

from instar.config import RunConfig, UpstreamEngineConfig
from instar.engines.base import Engine
from instar.gateway.app import HASH_KEY_NAME, create_app
from instar.gateway.upstream.base import Upstream
from instar.gateway.upstream.http import HttpUpstream
from instar.models import resolve_tokenizer
from instar.record.base import Renderer
from instar.store.base import Store


@asynccontextmanager
async def open_gateway(
    config: RunConfig, store: Store, engine: Engine | None, admin_key: str
) -> AsyncGenerator[Starlette]:
    """Without an ``engine``, the config's upstream answers. Store and engine stay open on leaving."""
    async with AsyncExitStack() as stack:

        def connect(section: UpstreamEngineConfig, path: str) -> Upstream:
            upstream = HttpUpstream(section, path)
            stack.push_async_callback(upstream.close)
            return upstream

        renderer = None
        if engine is not None:
            folder = resolve_tokenizer(config.model.name)
            renderer = await asyncio.to_thread(Renderer.load, folder, config.model)
        own = config.engine
        yield create_app(
            store=store,
            engine=engine,
            renderer=renderer,
            run_id=config.name,
            agent_id=config.agent_id,
            policy_id=config.name,
            config=config.gateway,
            admin_key=admin_key,
            hash_key=await store.secret(HASH_KEY_NAME),
            train_sampling=config.rollout.sampling if config.rollout else None,
            upstream=connect(own, "engine") if isinstance(own, UpstreamEngineConfig) else None,
            upstreams={name: connect(s, f"upstreams.{name}") for name, s in config.upstreams.items()},
            models=config.models,
        )
