"""Setup for all tests."""

from __future__ import annotations

from instar.cpu import disable_broken_amx
from instar.models import cache_dir

# Must run before any test uses torch. The processes that tests start inherit the setting.
disable_broken_amx(cache_dir())
