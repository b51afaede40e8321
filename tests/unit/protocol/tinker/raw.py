"""A client without an SDK that sends the same JSON as tinker 0.22."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import httpx


class RawTinkerClient:
    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, timeout=60)

    def __enter__(self) -> RawTinkerClient:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        return self._http.post(path, headers=headers, **content)

    def get(self, path: str) -> httpx.Response:
        return self._http.get(path)

    def submit(self, path: str, body: Any, **headers: str) -> str:
        response = self.post(path, body, **headers)
        assert response.status_code == 200, response.text
        return response.json()["request_id"]

    def retrieve_result(self, request_id: str) -> dict[str, Any]:
        response = self.post("retrieve_future", {"request_id": request_id})
        assert response.status_code == 200, response.text
        return response.json()

    def create_session(self) -> str:
        response = self.post("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.22.0"})
        return response.json()["session_id"]

    def create_model(self, session_id: str, base_model: str, sequence_number: int = 0, **lora: Any) -> str:
        request = {
            "session_id": session_id,
            "model_seq_id": sequence_number,
            "base_model": base_model,
            "lora_config": {"rank": 4, "seed": 3, **lora},
        }
        return self.retrieve_result(self.submit("create_model", request))["model_id"]
