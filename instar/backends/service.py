"""Code that backends of training services share: session starts, gradient counts and saved states."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from instar.backends.base import NO_GRADIENT
from instar.backends.folders import write_folder
from instar.clouds.base import MAX_SESSION_STARTS
from instar.clouds.errors import CloudError
from instar.errors import BackendError, BackendLost, InstarError, NonFiniteError

T = TypeVar("T")

STATE_FILE = "state.json"
NO_SESSION = "there is no training session: start one, or load a state"
NOT_FINITE = re.compile(r"\b(is|are|was) (nan|[-+]?inf(inity)?)\b|\b(not|non)[- _]?finite\b", re.IGNORECASE)
"""A pattern for errors about losses and gradients that are not finite. Services have no error code for
them."""


class GradientCounter:
    """Counts the calls that added to the service's gradient since the last step, as far as is known."""

    def __init__(self) -> None:
        self.calls = 0

    def require_gradient(self) -> None:
        """Raise BackendError if there is no gradient: a service would apply an empty step with weight
        decay."""
        if not self.calls:
            raise BackendError(NO_GRADIENT)


async def start_session(create: Callable[[], Awaitable[T]]) -> T:
    """Return a new session. If the service loses the session while it starts, as happens during a restart,
    create another one. Raises BackendError if that happens every time, because the service then does not have
    what was requested."""
    message = ""
    for _ in range(MAX_SESSION_STARTS):
        try:
            return await create()
        except BackendLost as error:
            message = str(error)
    raise BackendError(message)


def translate_error(error: CloudError) -> InstarError:
    if error.kind == "refused" and NOT_FINITE.search(str(error)):
        return NonFiniteError(str(error))
    return error.to_backend_error()


async def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a folder that refers to a state stored by the service."""
    text = json.dumps(state, indent=1) + "\n"

    def fill(folder: Path) -> None:
        (folder / STATE_FILE).write_text(text)

    await asyncio.to_thread(write_folder, path, fill)


def read_state(path: Path, key: str, expected: Mapping[str, Any]) -> str:
    """Return the service's name for a saved state, which is stored in the folder under ``key``. Raises
    BackendError if the state's other fields are not as expected."""
    try:
        state: dict[str, Any] = dict(json.loads((path / STATE_FILE).read_text()))
        name = str(state[key])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BackendError(f"{path} does not contain a saved state: {error}") from error
    for field, value in expected.items():
        if state.get(field) != value:
            raise BackendError(f"{path} was saved with {field} {state.get(field)!r}, not {value!r}")
    return name
