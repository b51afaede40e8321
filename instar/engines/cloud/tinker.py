"""Engines that sample from Tinker or MinT."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from instar.clouds.base import CloudError
from instar.clouds.tinker import TinkerConnection, align_prompt_logprobs, build_model_input
from instar.engines.cloud.base import CloudEngine, CloudReply
from instar.types import FinishReason, Floats, Ids, SamplingParams


@dataclass(frozen=True, slots=True)
class TinkerSamplingClient:
    connection: TinkerConnection
    sdk_client: Any


class TinkerSampler(CloudEngine):
    _connection: TinkerConnection | None = None

    async def open_sampler(self, path: str | None) -> TinkerSamplingClient:
        if self._connection is None:
            self._connection = await TinkerConnection.connect(self.cloud_config, self.model)
        connection = self._connection
        model = {"base_model": connection.access.base_model} if path is None else {"model_path": path}
        request = connection.client.create_sampling_client_async(**model)
        return TinkerSamplingClient(connection, await connection.await_result("opening a sampler", request))

    async def sample(self, client: TinkerSamplingClient, prompt: Ids, params: SamplingParams) -> CloudReply:
        connection = client.connection
        sdk_params = connection.sdk.types.SamplingParams(
            max_tokens=min(params.max_tokens, self.info.max_context - len(prompt)),
            seed=params.seed,
            stop=self._build_stop_list(params),
            temperature=params.temperature,
            top_k=params.top_k or -1,
            top_p=params.top_p,
        )
        request = client.sdk_client.sample_async(build_model_input(connection.sdk, prompt), 1, sdk_params)
        response = await connection.await_result("sampling", request)
        if len(response.sequences) != 1:
            raise CloudError("broken", f"sampling: expected 1 reply, got {len(response.sequences)}")
        sequence = response.sequences[0]
        ids = [int(token) for token in sequence.tokens]
        logprobs = [float(value) for value in sequence.logprobs or [math.nan] * len(ids)]
        if len(logprobs) != len(ids):
            raise CloudError("broken", f"sampling: got {len(logprobs)} logprobs for {len(ids)} tokens")
        reason: FinishReason = "length" if sequence.stop_reason == "length" else "stop"
        return CloudReply(ids, logprobs, reason)

    def _build_stop_list(self, params: SamplingParams) -> list[str] | list[int] | None:
        """Return the stop sequences, or None to keep the SDK's default. The list replaces the default, so it
        includes the end-of-sequence tokens. The SDK does not accept both strings and ids, so the ids are
        decoded to text if there are stop strings."""
        ids = sorted({*self.eos_ids, *params.stop_token_ids})
        if params.stop:
            texts = [self.tokenizer.decode([token], skip_special_tokens=False) for token in ids]
            return [*params.stop, *filter(None, texts)]
        return ids if params.stop_token_ids else None

    async def score(self, client: TinkerSamplingClient, token_ids: Ids) -> Floats:
        connection = client.connection
        request = client.sdk_client.compute_logprobs_async(build_model_input(connection.sdk, token_ids))
        return align_prompt_logprobs(await connection.await_result("scoring", request), len(token_ids))

    async def disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close(finish=True)


class MintSampler(TinkerSampler):
    """An engine that samples from MinT, whose SDK has the same interface as Tinker's."""
