"""A well-behaved client in its own process. It holds conversations of ten turns, one call at a time.

    python -m fuzz_parts.bystander HOST PORT OUTPUT

The admin key is read from standard input. Each line of OUTPUT contains the start of a call as a Unix time in
seconds, and its duration in milliseconds.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

from gateway_parts.processes import MeasurementError

TURNS = 10
PAUSE_SECONDS = 0.03
TIMEOUT_SECONDS = 60


class BystanderLog:
    """Reads the latencies that the well-behaved client writes to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def read(self, start: float, end: float) -> list[float]:
        """Return the latencies in ms of new calls that began and ended in this period."""
        with self._path.open() as file:
            file.seek(self._position)
            lines = file.read().splitlines()
            self._position = file.tell()
        pairs = [tuple(map(float, line.split())) for line in lines if line.count(" ") == 1]
        return [ms for started_at, ms in pairs if started_at >= start and started_at + ms / 1000 <= end]


@contextlib.contextmanager
def start_bystander(folder: Path, address: tuple[str, int], admin_key: str) -> Generator[BystanderLog]:
    """Run the client until the context ends. Raises MeasurementError if the client has exited before that."""
    output, host = folder / "latencies", address[0]
    output.touch()
    command = [sys.executable, "-m", "fuzz_parts.bystander", host, str(address[1]), str(output)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    )
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write(admin_key + "\n")
    process.stdin.close()
    try:
        yield BystanderLog(output)
        if process.poll() is not None:
            raise MeasurementError(f"the well-behaved client exited: {process.stderr.read()[-500:]}")
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def main() -> None:
    host, port, output = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    admin_key = sys.stdin.readline().strip()
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)

    def post(path: str, key: str, body: object) -> dict[str, object]:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        content = response.read()
        if response.status >= 300:
            raise SystemExit(f"the well-behaved client received status {response.status}: {content[:300]!r}")
        return json.loads(content)

    with output.open("a", buffering=1) as file:
        while True:
            key = str(post("/sessions", admin_key, {})["api_key"])
            messages: list[object] = []
            for turn in range(TURNS):
                messages.append({"role": "user", "content": f"Question {turn}: what is {turn} plus one?"})
                start = time.time()
                reply = post("/v1/chat/completions", key, {"model": "m", "messages": messages})
                file.write(f"{start:.4f} {1000 * (time.time() - start):.3f}\n")
                messages.append(reply["choices"][0]["message"])  # type: ignore[index]
                time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    main()
