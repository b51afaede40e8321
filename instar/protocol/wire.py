"""Request fields that both protocols share."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from pydantic import ValidationError

from instar.config import AdamConfig
from instar.protocol.base import AdapterSpec, ProtocolError
from instar.types import SamplingParams


class LoraFields(Struct, kw_only=True):
    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def to_adapter_spec(self) -> AdapterSpec:
        return AdapterSpec(self.rank, self.seed, self.train_attn, self.train_mlp, self.train_unembed)


class AdamFields(Struct, kw_only=True):
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float

    def to_config(self) -> AdamConfig:
        """Return the optimizer's settings. Raises ProtocolError for a value out of range."""
        try:
            adam = AdamConfig(
                # Schedules begin or end with a learning rate of 0, which a run's config rejects.
                lr=self.learning_rate or 1.0,
                beta1=self.beta1,
                beta2=self.beta2,
                eps=self.eps,
                weight_decay=self.weight_decay,
                grad_clip_norm=self.grad_clip_norm,
            )
        except ValidationError as error:
            first = error.errors()[0]
            raise ProtocolError(f"adam_params: {first['loc'][0]}: {first['msg']}") from None
        return adam.model_copy(update={"lr": self.learning_rate})


class SamplingFields(Struct, kw_only=True):
    max_tokens: int | None = None
    seed: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    def to_params(
        self, *, max_tokens: int, seed: int | None, stop: Iterable[str], stop_token_ids: Iterable[int]
    ) -> SamplingParams:
        """Return the sampling parameters. ``max_tokens`` is used if the request does not set a limit."""
        return SamplingParams(
            max_tokens=max_tokens if self.max_tokens is None else self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            seed=seed,
            stop=tuple(stop),
            stop_token_ids=tuple(stop_token_ids),
        )
