"""Functions for the backends of training services: session starts, gradient counts and saved states."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from instar.backends.base import NO_GRADIENT
from instar.backends.folders import write_folder
from instar.clouds.base import MAX_SESSION_STARTS, CloudError
from instar.errors import BackendError, BackendLost, InstarError, NonFiniteError

T = TypeVar("T")

STATE_FILE = "state.json"
NO_SESSION = "there is no training session; call start or load_state first"
NON_FINITE_PATTERN = re.compile(
    r"\b(is|are|was) (nan|[-+]?inf(inity)?)\b|\b(not|non)[- _]?finite\b", re.IGNORECASE
)
"""Matches messages about non-finite losses and gradients. Services have no error code for these errors."""


class GradientCounter:
    """Counts the calls since the last step that added to the service's gradient."""

    def __init__(self) -> None:
        self.calls = 0

    def require_gradient(self) -> None:
        # Without a gradient, a service would still apply the weight decay.
        if not self.calls:
            raise BackendError(NO_GRADIENT)


async def start_session(create: Callable[[], Awaitable[T]]) -> T:
    """Return a new session. If the service loses the session during the start, as it may while the service
    restarts, create another one. Raises BackendError after `MAX_SESSION_STARTS` attempts."""
    message = ""
    for _ in range(MAX_SESSION_STARTS):
        try:
            return await create()
        except BackendLost as error:
            message = str(error)
    raise BackendError(message)


def translate_error(error: CloudError) -> InstarError:
    if error.kind == "refused" and NON_FINITE_PATTERN.search(str(error)):
        return NonFiniteError(str(error))
    return error.to_backend_error()


async def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a folder that refers to a state stored by the service."""
    text = json.dumps(state, indent=1) + "\n"

    def fill(folder: Path) -> None:
        (folder / STATE_FILE).write_text(text)

    await asyncio.to_thread(write_folder, path, fill)


def read_state(path: Path, key: str, expected: Mapping[str, Any], file: str = STATE_FILE) -> str:
    """Return the value of ``key`` in a saved state. Raises BackendError if the state cannot be read or was
    saved with settings other than the ``expected`` ones."""
    try:
        state: dict[str, Any] = dict(json.loads((path / file).read_text()))
        value = str(state[key])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BackendError(
            f"cannot load a training state from {path}: {file} is missing or invalid "
            f"({type(error).__name__}: {error})"
        ) from error
    for name, setting in expected.items():
        if state.get(name) != setting:
            raise BackendError(
                f"cannot load the training state in {path}: it was saved with {name} {state.get(name)!r}, "
                f"but this backend has {name} {setting!r}"
            )
    return value
