"""The logprobs of a prompt, without a reply."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

from instar.gateway.base import ApiError, bad_request, invalid_value
from instar.gateway.dialects.base import ModelRequest, TokenLogprob
from instar.gateway.dialects.common import check_token_ids
from instar.gateway.engine_source import EngineSource
from instar.gateway.tokenizing import MIN_LARGE_PROMPT


async def score_prompt(
    source: EngineSource, request: ModelRequest, headers: Mapping[str, str], timeout: float
) -> list[TokenLogprob]:
    """Return the texts and logprobs of the prompt's tokens. Nothing is sampled or recorded. Raise
    ApiError if the prompt is empty or the engine cannot score (400), or if it takes too long (504)."""
    source.check_request(request)
    engine, renderer = source.engine, source.get_renderer(request)
    if not engine.info.can_score:
        message = "The engine cannot return prompt logprobs; send the request without 'echo'."
        raise bad_request(message, "echo", "unsupported_value")
    if source.live is not None:
        message = "'echo' is not supported in a run with data 'live'; send the request without 'echo'."
        raise bad_request(message, "echo", "unsupported_value")
    if source.parse_policy(request.model) is not None:
        name = source.default_policy_id
        message = f"'echo' is only supported for the served version; request the model {name!r}."
        raise bad_request(message, "echo", "unsupported_value")
    prompt = request.prompt
    assert prompt is not None
    if isinstance(prompt, str):
        encode = partial(renderer.encode, prompt)
        ids = await source.tokenize(headers, encode) if len(prompt) >= MIN_LARGE_PROMPT else encode()
    else:
        ids = prompt
    if not len(ids):
        raise invalid_value("The prompt is empty; send at least one token.", "prompt")
    check_token_ids(ids, engine.info.vocab_size, "prompt")
    try:
        async with asyncio.timeout(timeout):
            logprobs = await engine.logprobs(ids)
    except TimeoutError as error:
        message = f"The engine did not return logprobs within {timeout:g} seconds; retry later."
        raise ApiError(504, message, code="timeout") from error
    decode = renderer.decode_token
    return [TokenLogprob(decode(i), p) for i, p in zip(ids, logprobs.tolist(), strict=True)]
