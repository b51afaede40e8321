"""Settings of all tests."""

from __future__ import annotations

from instar.cpu import disable_broken_amx
from instar.models import cache_dir

# Before any test computes, and inherited by the processes that tests start.
disable_broken_amx(cache_dir())
