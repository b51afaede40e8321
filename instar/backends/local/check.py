"""Check that the backend computes a model's architecture with the logprobs and gradients of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from instar.architecture import compute_logprobs, find_problem, make_sequences
from instar.backends.local.model import load_model, prepare_model
from instar.backends.local.pack import pack
from instar.config import LocalBackendConfig, ModelConfig
from instar.errors import BackendError
from instar.models import copy_with_shared_weights


def check_architecture(config: ModelConfig) -> None:
    """Raise BackendError unless the backend computes the model like transformers does."""
    problem = find_problem(config, Path(__file__).parent, _measure_error)
    if problem is not None:
        raise BackendError(
            f"The local backend does not support the model {config.name!r}: {problem}. Set backend.type to "
            "verl or to a training service."
        )


def _measure_error(config: ModelConfig, model: Any) -> float:
    """Return the maximum difference of the logprobs and gradients of packed sequences with a common prefix.
    Gradients are relative to the largest one."""
    base = prepare_model(copy_with_shared_weights(model))
    fp32_config = config.model_copy(update={"dtype": "fp32"})
    trained_model = load_model(fp32_config, LocalBackendConfig(lora=None), 0, base)
    model.to(trained_model.device)
    sequences = make_sequences()
    packed = pack(sequences)
    logprobs = torch.zeros(len(packed), device=trained_model.device)
    positions = np.flatnonzero(packed.previous >= 0)
    logprobs[positions] = trained_model.compute_logprobs(packed, positions)
    actual = torch.cat([logprobs[path[1:]] for path in packed.paths])
    expected = torch.cat([compute_logprobs(model, ids) for ids in sequences])
    weights = torch.linspace(-1, 1, len(expected), device=expected.device)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    actual_gradient, expected_gradient = (
        torch.cat(
            [
                gradient.flatten()
                for gradient in torch.autograd.grad(
                    (values * weights).sum(), parameters, materialize_grads=True
                )
            ]
        )
        for values in (actual, expected)
    )
    gradient_error = (actual_gradient - expected_gradient).abs().max() / expected_gradient.abs().max()
    return float(torch.maximum((actual - expected).abs().max(), gradient_error).detach())
