"""What a client is told about a failure of the backend or the engine behind a protocol."""

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

log = logging.getLogger(__name__)


def to_protocol_error(error: Exception) -> ProtocolError:
    """What the local backend refuses is the client's to mend. What is no error of ours is named by its type
    alone, for its text may hold what is not the client's to see; the log has it all."""
    if isinstance(error, ProtocolError):
        return error
    if isinstance(error, (EngineUnavailable, BackendUnavailable)):
        return ProtocolError(str(error), 503, "server")
    if isinstance(error, (NonFiniteError, PromptTooLong, BackendError)):
        return ProtocolError(str(error))
    log.error("an operation failed", exc_info=error)
    text = str(error) if isinstance(error, InstarError) else f"internal error: {type(error).__name__}"
    return ProtocolError(text, 500, "server")


@contextmanager
def convert_errors() -> Generator[None]:
    """Failures inside become ProtocolErrors."""
    try:
        yield
    except Exception as error:
        raise to_protocol_error(error) from error
