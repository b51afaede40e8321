"""Decides when a run learns from live traffic, and which new versions serve its agents."""
