"""Agents for the built-in task sets. Each is an ordinary agent: an SDK and a loop."""
