"""Logprobs of given tokens, and of constrained replies, for which vLLM does not return them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from instar.engines.vllm import wire
from instar.engines.vllm.client import VllmClient
from instar.engines.vllm.serving import PolicyLease
from instar.errors import EngineError
from instar.types import Floats, Ids, SamplingParams, TokenChunk


async def score_tokens(client: VllmClient, ids: Ids, model: str | None) -> Floats:
    """Return the logprobs of at least two tokens."""
    body = wire.encode_score_request(ids, model)
    try:
        response = wire.decode_scores(await client.post_bytes(wire.GENERATE_PATH, body))
    except msgspec.DecodeError as error:
        raise EngineError(f"vLLM's response to a score request cannot be read: {error}") from error
    scores = np.full(len(ids), np.nan, np.float32)
    for position, logprobs in enumerate(response.prompt_logprobs[1:], start=1):
        entry = (logprobs or {}).get(str(ids[position]))
        scores[position] = np.nan if entry is None else wire.clean_logprob(entry.logprob)
    scores[-1] = wire.get_logprobs(response.choices[0])[0]
    return scores


async def score_constrained(
    client: VllmClient, prompt: Ids, params: SamplingParams, lease: PolicyLease, chunks: Sequence[TokenChunk]
) -> TokenChunk:
    """Return a constrained reply as one chunk. vLLM masks the logits first, so its logprobs are those of the
    constrained softmax. Those of the full softmax need a second request; they are NaN if the caller does not
    need them, or if the weights changed."""
    ids = [token for chunk in chunks for token in chunk.token_ids]
    versions = [version for chunk in chunks for version in chunk.versions]
    scores = np.full(len(ids), np.nan, np.float32)
    if params.logprobs and set(versions) == {lease.get_version()}:
        scored = await score_tokens(client, np.concatenate([prompt, np.asarray(ids, np.int32)]), lease.model)
        scores = scored[len(prompt) :] if versions[0] == lease.get_version() else scores
    is_truncated = msgspec.structs.replace(params, constraint=None).modifies_distribution
    behavior = [chunk.behavior_logprobs if is_truncated else chunk.logprobs for chunk in chunks]
    return TokenChunk(
        token_ids=ids,
        logprobs=scores.tolist(),
        versions=versions,
        behavior_logprobs=[value for values in behavior for value in values or ()],
        finish_reason=chunks[-1].finish_reason,
        stop=chunks[-1].stop,
    )
