"""Finds decoding rows that begin with the same tokens under the same weights.

Sessions of one agent share a long prefix: system message, tools, examples. Its keys are the same in every
such row, so attention to them is one matrix product for all rows instead of one for each.
"""

from __future__ import annotations

from collections.abc import Sequence

from instar.engines.local.prefix import common_length
from instar.types import Ids

MIN_SHARED_TOKENS = 64
"""A shorter prefix is not worth sharing."""
MIN_SHARED_ROWS = 4
"""The average number of rows per shared prefix must be at least this."""


def find_shared_prefixes(
    prompts: Sequence[Ids], weights: Sequence[int]
) -> tuple[int, list[list[int]]] | None:
    """Return the length of the shared prefixes and the rows that share each one, or None if too little is
    shared. ``weights`` identifies the weights that computed each row's prefix; only rows with equal values
    can share."""
    groups: dict[tuple[int, bytes], list[int]] = {}
    for row, (prompt, computed_under) in enumerate(zip(prompts, weights, strict=True)):
        groups.setdefault((computed_under, prompt[:MIN_SHARED_TOKENS].tobytes()), []).append(row)
    if len(prompts) < MIN_SHARED_ROWS * len(groups):
        return None
    length = min(
        min(common_length(prompts[rows[0]], prompts[row]) for row in rows) for rows in groups.values()
    )
    # Each row keeps one key that is not shared, so that no attention block is empty.
    length = min(length, min(len(prompt) for prompt in prompts) - 1)
    return (length, list(groups.values())) if length >= MIN_SHARED_TOKENS else None
