"""Serve an engine in its own process. Print its URL when it is ready, and exit when stdin closes.

python host.py CONFIG_FILE
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from instar.config import RunConfig
from instar.engines.factory import create_engine
from instar.engines.server import create_engine_app
from instar.gateway.serve import bind, serve


async def main(config: RunConfig, log: Path) -> None:
    engine = create_engine(config)
    stop = asyncio.Event()
    await engine.start(log, report=lambda line: print(line, file=sys.stderr))
    listener = bind("127.0.0.1", 0)
    host, port = listener.getsockname()[:2]
    server_task = asyncio.create_task(serve(create_engine_app(engine), listener, stop=stop))
    print(f"http://{host}:{port}", flush=True)
    try:
        await asyncio.to_thread(sys.stdin.read)
    finally:
        stop.set()
        await server_task
        await engine.close()


if __name__ == "__main__":
    config_path = Path(sys.argv[1])
    config = RunConfig.model_validate_json(config_path.read_bytes())
    asyncio.run(main(config, config_path.with_suffix(".log")))
