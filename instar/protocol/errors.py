"""Converts errors of backends and engines to the errors that clients receive."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager

from instar.errors import (
    BackendError,
    BackendUnavailable,
    EngineUnavailable,
    InstarError,
    NonFiniteError,
    PromptTooLong,
)
from instar.protocol.base import ProtocolError

logger = logging.getLogger(__name__)


def to_protocol_error(error: Exception) -> ProtocolError:
    """Return the error to report to the client. A request that the local backend rejects is a user error.

    Of an unexpected exception the client gets only the type: the text may contain internals, and is logged.
    """
    if isinstance(error, ProtocolError):
        return error
    if isinstance(error, (EngineUnavailable, BackendUnavailable)):
        return ProtocolError(str(error), 503, "server")
    if isinstance(error, (NonFiniteError, PromptTooLong, BackendError)):
        return ProtocolError(str(error))
    logger.error("an operation failed", exc_info=error)
    text = str(error) if isinstance(error, InstarError) else f"internal error: {type(error).__name__}"
    return ProtocolError(text, 500, "server")


@contextmanager
def convert_errors() -> Generator[None]:
    """Raise every error in the block as a ProtocolError."""
    try:
        yield
    except Exception as error:  # every error is converted
        raise to_protocol_error(error) from error
