"""The umasks of Instar's processes.

A run's files are private. Agents, rules and model servers run with the user's umask, because their files
belong to the user. The model cache is also written with it, because several users may share the cache.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

PRIVATE_UMASK = 0o077
USER_UMASK_ENV = "INSTAR_USER_UMASK"
"""Environment variable with the user's umask (octal), for roles, which inherit a private umask."""


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
