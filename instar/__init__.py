"""Instar: make the agent you already have learn from its own runs."""

__version__ = "0.1.0"
