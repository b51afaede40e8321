"""Config section for the data that a run trains on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any, Self, cast

from pydantic import Field, field_validator, model_validator

from instar.config.base import PositiveInt, Section

ROLLOUT = "rollout"
"""The source of a run's own rollouts."""
LIVE = "live"
"""The source of live traffic."""
DATASET_PREFIX = "dataset:"
MAX_SHARE_DENOMINATOR = 10_000


class DataConfig(Section):
    """A source of groups to train on. Use a list to mix several sources."""

    source: str = ROLLOUT
    """`rollout`: the sessions of this run's rollout. `live`: the sessions outside any rollout of agents whose
    mode in `agents` is `learn`; see docs/live.md. `dataset:NAME` or `dataset:NAME@VERSION`: a named
    dataset (see `instar datasets`), by default its newest version. Any other value is the path of an exported
    folder."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of the groups in each step. The shares of all sources must add up to 1."""
    epochs: PositiveInt | None = None
    """Number of passes over exported data. After the last pass, the source's share of each step stays
    empty. Default: 1, or as many as the run needs if the data is mixed with `rollout` or
    `live`."""
    content: str | None = None
    """Content hash that the exported data must have. Default: the hash at the start of the run, which also
    applies when the run is resumed."""

    @field_validator("source")
    @classmethod
    def _check_source(cls, source: str) -> str:
        name, at, version = source.removeprefix(DATASET_PREFIX).partition("@")
        if not name or (source.startswith(DATASET_PREFIX) and at and not version.isdecimal()):
            raise ValueError(
                "must be rollout, live, dataset:NAME, dataset:NAME@VERSION or the path of a folder, got "
                f"{source!r}"
            )
        return source

    @model_validator(mode="after")
    def _check_export_settings(self) -> Self:
        if not self.is_exported and (self.epochs is not None or self.content is not None):
            raise ValueError(f"epochs and content can only be set for exported data, not for {self.source!r}")
        return self

    @property
    def is_rollout(self) -> bool:
        return self.source == ROLLOUT

    @property
    def is_live(self) -> bool:
        return self.source == LIVE

    @property
    def is_exported(self) -> bool:
        return not (self.is_rollout or self.is_live)

    @property
    def dataset(self) -> tuple[str, int | None] | None:
        """Name and version of the dataset, or None if the source is not a named dataset."""
        if not self.source.startswith(DATASET_PREFIX):
            return None
        name, _, version = self.source.removeprefix(DATASET_PREFIX).partition("@")
        return name, int(version) if version else None

    @property
    def label(self) -> str:
        """The label in the ids of the source's groups: the dataset's name and version, or a hash prefix."""
        if self.dataset is not None:
            return self.source.removeprefix(DATASET_PREFIX)
        return (self.content or "").removeprefix("sha256:")[:12]


def group_id_prefix(run_id: str, label: str) -> str:
    """Return the id prefix of the run's groups that come from the source with this label."""
    return f"{run_id}/data/{label}/"


def rename_previous_source(section: Any) -> Any:
    """Return a section from the stored settings of an earlier version, which called rollouts `live`."""
    is_previous = isinstance(section, dict) and cast(Any, section).get("source") == LIVE
    return {**section, "source": ROLLOUT} if is_previous else section


def normalize_data(value: Any) -> Any:
    """Return a list of sections, given one section, a bare source, or a list of either."""
    sections = cast(list[Any], value) if isinstance(value, list) else [value]
    return [{"source": section} if isinstance(section, str) else section for section in sections]


def check_data_sources(sections: Sequence[DataConfig]) -> None:
    if not sections:
        raise ValueError("data: must have at least one source")
    for section in sections:
        if _exact_share(section.share).denominator > MAX_SHARE_DENOMINATOR:
            raise ValueError(f"data: share {section.share} has too many digits; use at most 4 decimal places")
    if sum(_exact_share(section.share) for section in sections) != 1:
        shares = " + ".join(f"{section.share:g}" for section in sections)
        raise ValueError(f"data: the shares must add up to 1, got {shares}")
    if len({section.source for section in sections}) < len(sections):
        sources = ", ".join(section.source for section in sections)
        raise ValueError(f"data: each source may be listed only once, got {sources}")


def count_groups(shares: Sequence[float], total: int) -> list[int]:
    """Return how many of a run's first ``total`` groups come from each source. The next group always comes
    from the source that is furthest below its share, so the result depends only on the arguments."""
    order = _source_order(tuple(shares))
    rounds, remainder = divmod(total, len(order))
    per_round, in_last_round = Counter(order), Counter(order[:remainder])
    return [rounds * per_round[source] + in_last_round[source] for source in range(len(shares))]


@lru_cache(maxsize=8)
def _source_order(shares: tuple[float, ...]) -> tuple[int, ...]:
    """Return the source of each group in a round, as an index into ``shares``. A round is the shortest
    sequence of groups in which every source has exactly its share."""
    exact_shares = [_exact_share(share) for share in shares]
    length = 1
    while any((share * length).denominator != 1 for share in exact_shares):
        length += 1
    counts = [0] * len(shares)
    order: list[int] = []
    for size in range(1, length + 1):
        deficits = [share * size - count for share, count in zip(exact_shares, counts, strict=True)]
        source = deficits.index(max(deficits))
        counts[source] += 1
        order.append(source)
    return tuple(order)


def _exact_share(share: float) -> Fraction:
    """Return the decimal number in the config as an exact fraction."""
    return Fraction(repr(share))
