"""Helpers that serve a protocol in a separate thread, so that blocking SDKs can call it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from instar.config import ModelConfig
from instar.protocol.serve import serve_protocol


@contextmanager
def serve_in_thread(protocol: str, model: ModelConfig, **options: Any) -> Generator[str]:
    """Serve the protocol until the block exits, and yield the server's URL."""
    address: Future[str] = Future()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    def run() -> None:
        try:
            loop.run_until_complete(
                serve_protocol(protocol, model, threads=1, on_ready=address.set_result, stop=stop, **options)
            )
        except BaseException as error:  # raised in the thread that waits for the address
            if not address.done():
                address.set_exception(error)
            raise
        finally:
            loop.close()

    thread = threading.Thread(target=run, name=f"served-{protocol}")
    thread.start()
    try:
        yield address.result(100)
    finally:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        assert not thread.is_alive()


def make_tiny_config(folder: Path, **options: Any) -> ModelConfig:
    from tests.tiny import make_tiny_model

    return ModelConfig(
        name=str(make_tiny_model(folder, **options)), dtype="fp32", device="cpu", max_context=256
    )
