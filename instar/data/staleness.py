"""The staleness of tokens: the number of training steps between their policy and the current policy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from instar.types import Ids, Sample


class Staleness:
    """Computes staleness relative to ``version``.

    ``step_by_version`` maps versions to the steps that produced them. A version that is not in the mapping is
    assumed to come from the step with the same number. A step that is repeated after a crash produces a new
    version, but tokens from its first version do not become more stale.
    """

    def __init__(self, version: int, step_by_version: Mapping[int, int] | None = None) -> None:
        step_by_version = step_by_version or {}
        steps = np.arange(1 + max(version, *step_by_version, 0), dtype=np.int32)
        steps[list(step_by_version)] = list(step_by_version.values())
        self._by_version = np.maximum(0, steps[version] - steps)

    def of_tokens(self, versions: Ids) -> Ids:
        """Return the staleness of each token. The values for tokens that were not sampled are meaningless."""
        return self._by_version.take(versions, mode="clip")

    def of_sample(self, sample: Sample) -> int:
        """Return the staleness of the sample's oldest trained token. The sample must have one."""
        return int(self.of_tokens(sample.versions[sample.mask > 0]).max())
