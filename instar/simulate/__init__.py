"""Simulates the queueing of a run on a virtual clock."""
