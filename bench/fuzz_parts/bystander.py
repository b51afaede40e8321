"""A well-behaved client in its own process. It holds conversations of ten turns, one call at a time.

    python -m fuzz_parts.bystander HOST PORT OUTPUT

The admin key is read from standard input. Each output line contains the start of a call and its duration in
ms.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from pathlib import Path

TURNS = 10
INTERVAL_S = 0.03
TIMEOUT_S = 60


def main() -> None:
    host, port, output = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    admin_key = sys.stdin.readline().strip()
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)

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
                time.sleep(INTERVAL_S)


if __name__ == "__main__":
    main()
