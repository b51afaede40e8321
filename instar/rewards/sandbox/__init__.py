"""Runs code that a model wrote, isolated from the machine."""
