"""Agents for the built-in task sets. They call the model with an ordinary SDK."""
