"""Config section for the times at which a run trains on live traffic."""

from __future__ import annotations

from instar.config.base import Section


class WindowConfig(Section):
    """The times at which the run trains, resamples, judges and evaluates."""
