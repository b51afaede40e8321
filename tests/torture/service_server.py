"""A protocol server that tests run in its own process. INSTAR_PROTOCOL_KEYS holds its key."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from instar.config import ModelConfig
from instar.protocol.base import ServiceLimits
from instar.protocol.serve import serve_protocol

MAX_MODELS = 10_000
"""The limit is high, because every killed trainer leaves its models behind."""


def main() -> None:
    """Serve until killed. A session expires ``session_ttl_seconds`` after the client's last request."""
    protocol, model, folder, port, session_ttl_seconds = sys.argv[1:]
    asyncio.run(
        serve_protocol(
            protocol,
            ModelConfig(name=model, dtype="fp32", device="cpu", max_context=256),
            folder=Path(folder),
            keys=[os.environ["INSTAR_PROTOCOL_KEYS"]],
            port=int(port),
            limits=ServiceLimits(max_models=MAX_MODELS, session_ttl=float(session_ttl_seconds)),
            threads=1,
        )
    )


if __name__ == "__main__":
    main()
