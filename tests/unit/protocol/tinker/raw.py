"""A client without an SDK, that speaks JSON as tinker 0.22 does."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import httpx


class Raw:
    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, timeout=60)

    def __enter__(self) -> Raw:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        return self._http.post(path, headers=headers, **content)

    def get(self, path: str) -> httpx.Response:
        return self._http.get(path)

    def submit(self, path: str, body: Any, **headers: str) -> str:
        answer = self.post(path, body, **headers)
        assert answer.status_code == 200, answer.text
        return answer.json()["request_id"]

    def result(self, request_id: str) -> dict[str, Any]:
        answer = self.post("retrieve_future", {"request_id": request_id})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def session(self) -> str:
        reported = self.post("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.22.0"})
        return reported.json()["session_id"]

    def model(self, session: str, base_model: str, number: int = 0, **lora: Any) -> str:
        request = {
            "session_id": session,
            "model_seq_id": number,
            "base_model": base_model,
            "lora_config": {"rank": 4, "seed": 3, **lora},
        }
        return self.result(self.submit("create_model", request))["model_id"]
