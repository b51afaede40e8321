"""The umasks of Instar's processes.

A run's files are private. Agents, rules and model servers run with the user's umask, because their files
belong to the user. The model cache is written with the same umask, because users may share it.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

PRIVATE_UMASK = 0o077
USER_UMASK_ENV = "INSTAR_USER_UMASK"
"""Environment variable with the user's umask (octal), for role processes, which inherit a private umask."""


def _read_user_umask() -> int:
    if inherited := os.environ.get(USER_UMASK_ENV):
        return int(inherited, 8)
    current = os.umask(PRIVATE_UMASK)  # the umask can only be read by changing it
    os.umask(current)
    return current


USER_UMASK = _read_user_umask()


@contextmanager
def use_umask(mask: int) -> Generator[None]:
    previous = os.umask(mask)
    try:
        yield
    finally:
        os.umask(previous)
