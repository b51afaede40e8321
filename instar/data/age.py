"""How old tokens are: how many steps lie between the policy that sampled them and the one to be trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from instar.types import Ids, Sample


@dataclass(frozen=True, slots=True)
class Age:
    """As of a version. Versions are not numbered like steps: a step that a crash undid is trained again, into
    a version of another number, and what the first one had sampled is no older for it."""

    version: int
    steps: Mapping[int, int] = field(default_factory=dict[int, int])
    """Of the versions that were made by a step of another number."""

    def of(self, versions: Ids) -> Ids:
        different, places = np.unique(versions, return_inverse=True)
        made_by = np.array([self._step(int(version)) for version in different], np.int32)
        return np.maximum(0, self._step(self.version) - made_by)[places]

    def of_sample(self, sample: Sample) -> int:
        """Of its oldest trained token."""
        return int(self.of(sample.versions[sample.mask > 0]).max())

    def _step(self, version: int) -> int:
        return self.steps.get(version, version)
