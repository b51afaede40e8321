"""An engine that samples from Weaver."""

from __future__ import annotations

import math
import re
from typing import Any, cast

from weaver import AsyncSamplingClient
from weaver.types import SamplingParams as WeaverSamplingParams

from instar.clouds.base import resolve_access
from instar.clouds.weaver import (
    WeaverCaller,
    WeaverClient,
    build_model_input,
    fetch_prompt_logprobs,
    make_malformed_error,
)
from instar.config import CloudEngineConfig, ModelConfig, WeaverBackendConfig
from instar.engines.cloud.base import CloudEngine, CloudReply
from instar.types import FinishReason, Floats, Ids, SamplingParams

MODEL_ID_IN_PATH = re.compile(r"weaver://([^/]+)/")


class WeaverSampler(CloudEngine):
    def __init__(
        self, model: ModelConfig, cloud_config: WeaverBackendConfig, engine_config: CloudEngineConfig
    ) -> None:
        super().__init__(model, cloud_config, engine_config)
        self._access = resolve_access(cloud_config, model)
        self._caller = WeaverCaller(self._access)
        self._client: WeaverClient | None = None

    async def open_sampler(self, path: str | None) -> AsyncSamplingClient:
        if self._client is None:
            client = WeaverClient(self._access)
            try:
                await self._caller.call("connect", client.connect)
            except BaseException:  # including cancellation: no one else can close the client
                await client.aclose()
                raise
            self._client = client
        client, base_model = self._client, self._access.base_model
        match = None if path is None else MODEL_ID_IN_PATH.match(path)
        return await self._caller.call(
            "create_sampling_client",
            lambda: client.create_sampling_client(
                base_model=base_model, model_path=path, model_id=match[1] if match else None
            ),
        )

    async def sample(self, client: AsyncSamplingClient, prompt: Ids, params: SamplingParams) -> CloudReply:
        model_input = build_model_input(prompt)
        weaver_params = WeaverSamplingParams(
            max_tokens=min(params.max_tokens, self.info.max_context - len(prompt)),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k or -1,
            stop=[*params.stop, *params.stop_token_ids],
            seed=params.seed,
        )
        handle = await self._caller.call(
            "sample", lambda: client.sample(prompt=model_input, sampling_params=weaver_params, wait=False)
        )
        return _parse_reply(await self._caller.await_operation("sample", handle))

    async def score(self, client: AsyncSamplingClient, token_ids: Ids) -> Floats:
        return await self._caller.call("compute_logprobs", lambda: fetch_prompt_logprobs(client, token_ids))

    async def disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


def _parse_reply(result: Any) -> CloudReply:
    reply = result.get("result", result) if isinstance(result, dict) else None
    try:
        sequence = cast(dict[str, Any], reply)["sequences"][0]
        ids = [int(token) for token in sequence["tokens"]]
        values = sequence.get("logprobs") or [None] * len(ids)
        logprobs = [math.nan if value is None else float(value) for value in values]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise make_malformed_error(f"sample: {type(error).__name__}: {error}") from None
    if len(logprobs) != len(ids):
        raise make_malformed_error(f"sample: got {len(logprobs)} logprobs for {len(ids)} tokens")
    reason: FinishReason = "length" if sequence.get("stop_reason") == "length" else "stop"
    return CloudReply(ids, logprobs, reason)
