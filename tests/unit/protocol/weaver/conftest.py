"""Fixtures that run the server in a separate thread, so that the SDK's blocking client can call it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from weaver import ServiceClient

from instar.config import ModelConfig
from instar.protocol.base import ServiceLimits
from instar.protocol.serve import serve_protocol
from tests.tiny import make_tiny_model

KEY, OTHER_KEY = "sk-test-one", "sk-test-two"
BASE_MODEL = "tiny"

Connect = Callable[..., ServiceClient]


@pytest.fixture(scope="package")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@contextmanager
def run_server(
    model_folder: Path, checkpoint_folder: Path, *, port: int = 0, limits: ServiceLimits | None = None
) -> Generator[str]:
    """Run a server until the block exits, and yield its URL."""
    address: Future[str] = Future()
    request_stop: Future[Callable[[], object]] = Future()

    async def run() -> None:
        stop_event, loop = asyncio.Event(), asyncio.get_running_loop()
        request_stop.set_result(lambda: loop.call_soon_threadsafe(stop_event.set))
        await serve_protocol(
            "weaver",
            ModelConfig(name=str(model_folder), dtype="fp32"),
            folder=checkpoint_folder,
            keys=[KEY, OTHER_KEY],
            port=port,
            base_model=BASE_MODEL,
            limits=limits,
            threads=1,
            on_ready=address.set_result,
            stop=stop_event,
        )

    def main() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:  # raised in the thread that waits for the address
            if not address.done():
                address.set_exception(error)
            raise

    thread = threading.Thread(target=main)
    thread.start()
    try:
        yield address.result(60)
    finally:
        request_stop.result(60)()
        thread.join(30)


@pytest.fixture(scope="package")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    with run_server(model_folder, tmp_path_factory.mktemp("checkpoints")) as address:
        yield address


@pytest.fixture
def connect(server: str) -> Generator[Connect]:
    """Return a function that connects clients to the server. They are closed after the test."""
    with ExitStack() as clients:

        def create(address: str = server, api_key: str = KEY, **options: object) -> ServiceClient:
            # On close, the SDK waits for its heartbeat interval, up to five seconds.
            client = ServiceClient(base_url=address, api_key=api_key, heartbeat_interval=0.05, **options)
            client.connect()
            clients.callback(client.close)
            return client

        yield create
