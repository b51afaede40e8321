"""Finds sessions that should not be trained on."""
