"""Config sections for the data of a step that trains on live traffic."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from instar.config.base import NonNegativeFloat, PositiveInt, Section
from instar.config.data import DataConfig

BASE_REFERENCE = "base"
"""The reference set that version 0 of the policy answers."""


class ReplayConfig(Section):
    """Earlier data that is trained on again with live traffic, so that new data does not displace abilities
    that it does not exercise."""

    share: Annotated[float, Field(ge=0, le=0.9)] = 0.2
    """Weight of replayed replies in a step, as a fraction of the step. 0 disables replay."""
    reference: str | None = BASE_REFERENCE
    """Fixed reference set. `base`: the replies of version 0 to built-in prompts, which are sampled once.
    `dataset:NAME`, `dataset:NAME@VERSION` or a folder: exported data, of which sessions without a reward or
    with one above 0 are used. null: no reference set."""
    content: str | None = None
    """Content hash that the exported data in `reference` must have. Default: its hash at the start of the
    run."""
    min_advantage: NonNegativeFloat = 0.0
    """Live sessions are replayed if their advantage was above this, and a version that was trained on them
    serves or is an ancestor of the version that serves."""
    max_repeats: PositiveInt = 3
    """Maximum number of steps that replay a live session. The reference set is repeated without limit."""
    max_base_kl: Annotated[float, Field(gt=0)] | None = 0.5
    """Maximum KL divergence per token between the base model and the policy. Steps that begin above it are
    also trained to approach the base model, with a weight that doubles until the KL falls. null: no maximum.
    Default: null if the run starts from an adapter (`model.adapter`)."""

    @property
    def reference_data(self) -> DataConfig | None:
        """The exported data in `reference`, or None if it is not exported data."""
        if self.reference is None or self.reference == BASE_REFERENCE:
            return None
        return DataConfig(source=self.reference, content=self.content)

    @field_validator("reference")
    @classmethod
    def _check_reference(cls, reference: str | None) -> str | None:
        if (
            reference is not None
            and reference != BASE_REFERENCE
            and not DataConfig(source=reference).is_exported
        ):
            raise ValueError(
                f"must be base, dataset:NAME, dataset:NAME@VERSION or the path of a folder, got {reference!r}"
            )
        return reference
