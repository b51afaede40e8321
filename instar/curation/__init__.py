"""Finds sessions that should not be used for training."""
