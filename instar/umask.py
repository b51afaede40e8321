"""The umasks of Instar's processes.

The files of a run are private. Agents, rules and model servers run with the user's umask, because their files
belong to the user, and so do files in the model cache, which several users may share.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

PRIVATE_UMASK = 0o077
USER_UMASK_ENV = "INSTAR_USER_UMASK"
"""Variable with the umask of the user as an octal number. Roles inherit the private umask of their parent."""


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
