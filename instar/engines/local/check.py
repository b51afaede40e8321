"""Check that the engine samples from a model's architecture with the logprobs of transformers."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instar.architecture import WINDOW, compute_logprobs, find_problem, make_sequences
from instar.config import ModelConfig
from instar.engines.local.model import EngineModel
from instar.engines.local.requests import SchedulerRequest
from instar.engines.local.scheduler import Scheduler
from instar.engines.stopping import StopRule
from instar.errors import EngineError
from instar.types import SamplingParams

PREFILL_TOKENS = 10
"""Less than a window, and no divisor of its length, so that prompts are computed in uneven pieces."""


def check_architecture(config: ModelConfig) -> None:
    """Raise EngineError unless the engine computes the model like transformers does."""
    problem = find_problem(config, Path(__file__).parent, _measure_error)
    if problem is not None:
        raise EngineError(
            f"The local engine does not support the model {config.name!r}: {problem}. Set engine.type to "
            "vllm."
        )


def _measure_error(config: ModelConfig, model: Any) -> float:
    """Return the maximum difference of the logprobs of two prompts with a common prefix and their replies."""
    engine_model = EngineModel(config.model_copy(update={"dtype": "fp32"}), model)
    context = 8 * WINDOW
    scheduler = Scheduler(
        engine_model, max_batch=4, prefill_tokens=PREFILL_TOKENS, kv_tokens=4 * context, max_adapters=1
    )
    params = SamplingParams(max_tokens=2 * WINDOW)
    tokenizer: Any = None  # needed only for stop strings
    requests: list[SchedulerRequest] = []
    for ids in make_sequences():
        for scores in (None, np.full(len(ids), np.nan, np.float32)):
            rule = StopRule(params, context, (), tokenizer)
            requests.append(SchedulerRequest(ids, params, rule, Random(0), context, scores=scores))
    replies: dict[SchedulerRequest, list[float]] = {request: [] for request in requests}
    for request in requests:
        scheduler.add(request)
    with torch.inference_mode():
        while scheduler.is_busy:
            for request, chunk in scheduler.step():
                assert not isinstance(chunk, EngineError), "only constrained requests fail"
                replies[request] += chunk.logprobs
    errors: list[Tensor] = []
    for request, logprobs in replies.items():
        with torch.no_grad():
            expected = compute_logprobs(model, [*request.prompt.tolist(), *request.sampled])
        actual = torch.tensor(logprobs if request.scores is None else request.scores[1:])
        errors.append(actual - expected[-len(actual) :].cpu())
    return float(torch.cat(errors).abs().max())
