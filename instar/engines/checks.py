"""What every engine refuses before it begins."""

from __future__ import annotations

import math
from collections.abc import Sequence

from instar.engines.base import EngineInfo
from instar.errors import EngineError, PromptTooLong
from instar.types import SamplingParams


def check_request(info: EngineInfo, prompt_ids: Sequence[int], params: SamplingParams) -> None:
    """Raise EngineError, or PromptTooLong where the context has no room for a single new token."""
    if len(prompt_ids) == 0:
        raise EngineError("the prompt is empty")
    if min(prompt_ids) < 0 or max(prompt_ids) >= info.vocab_size:
        raise EngineError(f"token ids must be from 0 to {info.vocab_size - 1}")
    if params.max_tokens < 1:
        raise EngineError(f"max_tokens must be at least 1, not {params.max_tokens}")
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise EngineError(f"temperature must be 0 or greater, not {params.temperature}")
    if not 0 < params.top_p <= 1:
        raise EngineError(f"top_p must be above 0 and at most 1, not {params.top_p}")
    if params.top_k < 0:
        raise EngineError(f"top_k must be 0 or greater, not {params.top_k}")
    if "" in params.stop:
        raise EngineError("a stop string is empty")
    if len(prompt_ids) >= info.max_context:
        raise PromptTooLong(
            f"a prompt of {len(prompt_ids)} tokens leaves no room in a context of {info.max_context}"
        )
