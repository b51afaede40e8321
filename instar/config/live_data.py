"""Config sections for the data of a step that trains on live traffic."""

from __future__ import annotations

from instar.config.base import Section


class ReplayConfig(Section):
    """Earlier data that is trained on again with live traffic."""
