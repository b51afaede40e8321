"""Modules of `bench/rewards.py`, each of which runs as its own process."""
