"""Looks for sessions that had better not be trained on."""
