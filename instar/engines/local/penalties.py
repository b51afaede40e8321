"""Penalties and biases on the logits of one request. The order and the formulas are those of vLLM."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from instar.types import Ids, SamplingParams


class LogitPenalties:
    """Changes a request's logits. It keeps the tokens that occurred, so that a step's cost does not depend on
    the vocabulary."""

    def __init__(self, params: SamplingParams, prompt: Ids, device: str) -> None:
        self._params = params
        self._device = device
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.long, device=device)
        self._biases = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)
        # Only the repetition penalty applies to the tokens of the prompt.
        seen = (
            np.unique(prompt).astype(np.int64) if params.repetition_penalty != 1.0 else np.empty(0, np.int64)
        )
        self._positions = {token: position for position, token in enumerate(seen.tolist())}
        self._size = len(seen)
        self._ids = np.concatenate([seen, np.empty(64, np.int64)])
        self._counts = np.zeros(len(self._ids), np.float32)
        """How often each of the tokens was sampled."""

    def count(self, token: int) -> None:
        """Count a sampled token."""
        position = self._positions.setdefault(token, self._size)
        if position == self._size:
            if self._size == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[position] = token
            self._size += 1
        self._counts[position] += 1

    def apply(self, logits_V: Tensor) -> None:
        """Change the logits in place."""
        params = self._params
        if params.logit_bias:
            logits_V[self._bias_ids] += self._biases
        if not self._size:
            return
        ids = torch.from_numpy(self._ids[: self._size]).to(self._device)
        logits = logits_V[ids]
        if (factor := params.repetition_penalty) != 1.0:
            logits = torch.where(logits > 0, logits / factor, logits * factor)
        if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
            counts = torch.from_numpy(self._counts[: self._size]).to(self._device)
            logits = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        logits_V[ids] = logits
