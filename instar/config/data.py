"""What a run trains on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any, Self, cast

from pydantic import Field, field_validator, model_validator

from instar.config.base import Positive, Section

LIVE = "live"
DATASET_PREFIX = "dataset:"
MAX_SHARE_DENOMINATOR = 10_000


class DataConfig(Section):
    """Where groups to train on come from. A list takes several, each with its share of every step."""

    source: str = LIVE
    """`live`: what agents do in this run. `dataset:NAME` or `dataset:NAME@VERSION`: exported data that was
    given a name (`instar datasets`), the newest version by default. Anything else is the folder of an
    export."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of the groups of a step. The shares of a list add up to 1."""
    epochs: Positive | None = None
    """How often exported data is gone through; what is used up leaves its place in the step empty. Default:
    once, or as often as the run needs where it is mixed with `live`."""
    content: str | None = None
    """The content hash that the exported data must have. Default: the one that it has when the run begins,
    which the run keeps."""

    @field_validator("source")
    @classmethod
    def _is_named(cls, source: str) -> str:
        name, at, version = source.removeprefix(DATASET_PREFIX).partition("@")
        if not name or (source.startswith(DATASET_PREFIX) and at and not version.isdecimal()):
            raise ValueError(f"given {source!r}; use live, dataset:NAME, dataset:NAME@VERSION or a folder")
        return source

    @model_validator(mode="after")
    def _live_is_new(self) -> Self:
        if self.is_live and (self.epochs is not None or self.content is not None):
            raise ValueError("epochs and content are of exported data, not of what agents do in this run")
        return self

    @property
    def is_live(self) -> bool:
        return self.source == LIVE

    @property
    def dataset(self) -> tuple[str, int | None] | None:
        """Name and version, where it has a name."""
        if not self.source.startswith(DATASET_PREFIX):
            return None
        name, _, version = self.source.removeprefix(DATASET_PREFIX).partition("@")
        return name, int(version) if version else None

    @property
    def label(self) -> str:
        """What its groups are known by in the run: the name with its version, or the first of its hash."""
        if self.dataset is not None:
            return self.source.removeprefix(DATASET_PREFIX)
        return (self.content or "").removeprefix("sha256:")[:12]


def group_prefix(run_id: str, label: str) -> str:
    """What the ids of the groups begin with that a run has of such data."""
    return f"{run_id}/data/{label}/"


def normalize_data(value: Any) -> Any:
    """A list may be left out where there is one, and a section where only its source is said."""
    given = cast(list[Any], value) if isinstance(value, list) else [value]
    return [{"source": each} if isinstance(each, str) else each for each in given]


def check_data_sources(given: Sequence[DataConfig]) -> None:
    for each in given:
        if _exact(each.share).denominator > MAX_SHARE_DENOMINATOR:
            raise ValueError(f"data: given a share of {each.share}; four digits behind the point at most")
    if sum(map(_exact, (each.share for each in given))) != 1:
        shares = " + ".join(f"{each.share:g}" for each in given)
        raise ValueError(f"data: the shares {shares or 'of nothing'} do not add up to 1")
    if len({each.source for each in given}) < len(given):
        raise ValueError("data: a source stands there twice; give it one share")


def count_groups(shares: Sequence[float], groups: int) -> list[int]:
    """How many of the first so many groups are each one's. The next place is always for whoever is furthest
    behind its share, so that it depends on nothing but the numbers."""
    order = _order(tuple(shares))
    rounds, begun = divmod(groups, len(order))
    whole, part = Counter(order), Counter(order[:begun])
    return [rounds * whole[place] + part[place] for place in range(len(shares))]


@lru_cache(maxsize=8)
def _order(shares: tuple[float, ...]) -> tuple[int, ...]:
    """Whose the places of a round are, after which everyone has exactly the share."""
    exact = [_exact(share) for share in shares]
    length = 1
    while any((share * length).denominator != 1 for share in exact):
        length += 1
    have = [0] * len(shares)
    order: list[int] = []
    for place in range(1, length + 1):
        behind = [share * place - had for share, had in zip(exact, have, strict=True)]
        next_one = behind.index(max(behind))
        have[next_one] += 1
        order.append(next_one)
    return tuple(order)


def _exact(share: float) -> Fraction:
    """The decimal number that was written."""
    return Fraction(repr(share))
