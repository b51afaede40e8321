"""Which sync carries a backend's artifacts to an engine."""

from __future__ import annotations

from collections.abc import Iterable

from instar.errors import ConfigError
from instar.sync.base import Sync, choose_artifact
from instar.types import ArtifactKind

ROUTES: dict[ArtifactKind, str] = {"adapter": "files", "weights": "files", "remote": "files"}


def create_sync(made: Iterable[ArtifactKind], taken: Iterable[ArtifactKind]) -> Sync:
    """Raises ConfigError when the pair has no route."""
    kind = choose_artifact(made, taken)
    if kind not in ROUTES:
        raise ConfigError(f"artifacts of kind {kind!r} have no sync; supported: {', '.join(sorted(ROUTES))}")
    from instar.sync.files import FileSync

    return FileSync()
