"""A gateway on a real socket, in the test process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from instar.config import RunConfig
from instar.engines.base import Engine
from instar.gateway.app import create_app, create_group_options
from instar.gateway.live_policies import LiveOptions
from instar.gateway.serve import bind, serve
from instar.record.render import load_renderer
from instar.rollout.admission import Admission
from instar.store.base import Store

ADMIN_KEY = "sk-instar-test-admin"


@asynccontextmanager
async def running_gateway(config: RunConfig, store: Store, engine: Engine) -> AsyncGenerator[str]:
    """Run a gateway and yield its URL. The policy id is the run's name."""
    app = create_app(
        store=store,
        engine=engine,
        renderer=load_renderer(Path(config.model.name), config.model),
        run_id=config.name,
        agent_id=config.agent_id,
        policy_id=config.name,
        config=config.gateway,
        train_sampling=config.group_settings.sampling,
        groups=create_group_options(config, Admission(config, store, config.name)),
        admin_key=ADMIN_KEY,
        agent_policies={name: config.get_policy_id(name) for name in config.agents},
        live=LiveOptions(config.live.canary) if config.trains_on_live else None,
    )
    listener = bind(config.gateway.host, config.gateway.port)
    stop = asyncio.Event()
    server = asyncio.create_task(serve(app, listener, stop=stop, grace=1, reject_early=app.reject_early))
    try:
        yield f"http://{config.gateway.host}:{listener.getsockname()[1]}"
    finally:
        stop.set()
        await server
