"""A call to a service that failed, told apart by what can be done about it. Every SDK has errors of its own;
backends and engines know these alone."""

from __future__ import annotations

from typing import Literal

from instar.errors import (
    BackendError,
    BackendLost,
    BackendUnavailable,
    ConfigError,
    EngineError,
    EngineUnavailable,
    InstarError,
)

CloudErrorKind = Literal["refused", "unavailable", "lost", "settings", "broken"]
"""``refused``: the service did nothing and says why. ``unavailable``: no answer within the deadline, or none
but errors that pass; what it did is not known. ``lost``: it no longer has the session, or what it has is not
known. ``settings``: the key or address is wrong. ``broken``: it does not take such a request, or
its answer makes no sense."""


class CloudError(Exception):
    def __init__(self, kind: CloudErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind: CloudErrorKind = kind

    def to_backend_error(self) -> InstarError:
        match self.kind:
            case "unavailable":
                return BackendUnavailable(str(self))
            case "lost":
                return BackendLost(str(self))
            case "settings":
                return ConfigError(str(self))
            case "refused" | "broken":
                return BackendError(str(self))

    def to_engine_error(self) -> InstarError:
        """A sampler that is lost can be opened again, so that is one to try again too."""
        if self.kind in ("unavailable", "lost"):
            return EngineUnavailable(str(self))
        return EngineError(str(self))


def redact_key(text: str, secret: str) -> str:
    """Without the key, should a service have written it into its answer."""
    return text.replace(secret, "***") if secret else text
