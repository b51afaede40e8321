"""Count the files of the packages in ``PACKAGES`` that a chat call executes.

    python tools/hops.py [--json]

Runs a gateway in this process, with the scripted engine and a SQLite store. After a warm-up call, a second
non-streamed call is traced in all threads. A file counts if a line in one of its functions runs.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import sys
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gateway", "record", "engines", "store")
ADMIN_KEY = "sk-instar-hops-admin"
PERIODIC_FUNCTIONS = ("LoopLagMonitor.run",)
"""Functions that run periodically and are not part of a call."""


class FileTracer:
    """Records the files in ``PACKAGES`` whose functions run while ``is_recording`` is set."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.is_recording = False
        self._prefixes = tuple(f"{ROOT}/instar/{package}/" for package in PACKAGES)

    @contextmanager
    def installed(self) -> Generator[None]:
        """Trace this thread and all threads that start inside the block."""
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if (
            not frame.f_code.co_filename.startswith(self._prefixes)
            or frame.f_code.co_qualname in PERIODIC_FUNCTIONS
        ):
            return None
        if self.is_recording and event == "line" and frame.f_code.co_name != "<module>":
            self.files.add(frame.f_code.co_filename.removeprefix(f"{ROOT}/"))
        return self._trace


async def _trace_call(folder: Path, tracer: FileTracer) -> None:
    """Send a warm-up call and a traced call to a gateway whose files are in the folder."""
    # Import and create everything here, because only threads that start under the tracer are traced.
    from transformers import LlamaConfig

    from instar.config import GatewayConfig, ModelConfig, ScriptedEngineConfig
    from instar.engines.scripted import ScriptedEngine
    from instar.gateway.app import create_app
    from instar.gateway.serve import bind, serve
    from instar.record.render import load_renderer
    from instar.store.sqlite import SqliteStore
    from tests.tiny import make_tiny_tokenizer

    make_tiny_tokenizer().save_pretrained(folder)
    LlamaConfig().save_pretrained(folder)
    model = ModelConfig(name=str(folder), max_context=1024)
    store = SqliteStore(folder / "store.db")
    app = create_app(
        store=store,
        engine=ScriptedEngine(model, ScriptedEngineConfig(replies=["Hello."])),
        renderer=load_renderer(folder, model),
        run_id="run",
        agent_id="agent",
        policy_id="policy",
        config=GatewayConfig(),
        admin_key=ADMIN_KEY,
    )
    listener = bind("127.0.0.1", 0)
    stop = asyncio.Event()
    server = asyncio.create_task(serve(app, listener, stop=stop, grace=1))
    port = listener.getsockname()[1]
    try:
        await asyncio.to_thread(_post, port, "warm up")
        tracer.is_recording = True
        await asyncio.to_thread(_post, port, "hello")
        tracer.is_recording = False
    finally:
        stop.set()
        await server
        await store.close()


def _post(port: int, text: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]})
    headers = {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", body, headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    if response.status != 200:
        raise RuntimeError(f"the gateway responded with status {response.status}: {content.decode()}")


def list_hops() -> list[str]:
    """Return the files that a chat call executes."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    tracer = FileTracer()
    with tempfile.TemporaryDirectory() as folder, tracer.installed():
        asyncio.run(_trace_call(Path(folder), tracer))
    return sorted(tracer.files)


def count_hops() -> int:
    return len(list_hops())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args()
    files = list_hops()
    if options.json:
        print(json.dumps({"hops": len(files), "files": files}))
    else:
        print("\n".join([*files, f"{len(files)} files"]))


if __name__ == "__main__":
    main()
