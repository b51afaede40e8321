"""Serve a scripted engine: ``python -m tests.unit.engines.engine_process MODEL FD REPLY``.

FD is the descriptor of a listening socket that the process inherits.
"""

from __future__ import annotations

import asyncio
import socket
import sys

from instar.config import ModelConfig, ScriptedEngineConfig
from instar.engines.scripted import ScriptedEngine
from instar.engines.server import create_engine_app
from instar.gateway.serve import serve

if __name__ == "__main__":
    model, descriptor, reply = sys.argv[1:]
    script = ScriptedEngineConfig(replies=[reply], delay=0.01)
    engine = ScriptedEngine(ModelConfig(name=model, max_context=256), script)
    asyncio.run(serve(create_engine_app(engine), socket.socket(fileno=int(descriptor)), grace=1))
