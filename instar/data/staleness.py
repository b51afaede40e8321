"""How old tokens are: how many steps lie between the policy that sampled them and the one to be trained."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from instar.types import Ids, Sample


class Staleness:
    """As of a version. Versions are not numbered like steps: a step that a crash undid is trained again, into
    a version of another number, and what the first one had sampled is no older for it."""

    def __init__(self, version: int, steps: Mapping[int, int] | None = None) -> None:
        """``steps``: by version, the step that made it; of one that is not named, the step of its number."""
        steps = steps or {}
        made_by = np.arange(1 + max(version, *steps, 0), dtype=np.int32)
        made_by[list(steps)] = list(steps.values())
        self._by_version = np.maximum(0, made_by[version] - made_by)

    def of_tokens(self, versions: Ids) -> Ids:
        """Of tokens that were not sampled it says nothing of use."""
        return self._by_version.take(versions, mode="clip")

    def of_sample(self, sample: Sample) -> int:
        """Of its oldest trained token."""
        return int(self.of_tokens(sample.versions[sample.mask > 0]).max())
