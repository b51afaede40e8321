"""Modules of bench/async.py."""
