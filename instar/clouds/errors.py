"""Errors of calls to a service, classified by what the caller can do. Backends and engines handle these
errors instead of the errors of each SDK."""

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
"""``refused``: the service did nothing and gives the reason. ``unavailable``: no response within the
deadline, or only transient errors; what the service did is unknown. ``lost``: the session no longer exists,
or its state is unknown. ``settings``: the key or address is wrong. ``broken``: the service does not support
such a request, or its response is malformed."""


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
        """Return the error for callers of an engine. A lost sampler can be opened again, so the error allows
        a retry."""
        if self.kind in ("unavailable", "lost"):
            return EngineUnavailable(str(self))
        return EngineError(str(self))


def redact_key(text: str, secret: str) -> str:
    """Return the text without the key. A service may quote the key in its response."""
    return text.replace(secret, "***") if secret else text
