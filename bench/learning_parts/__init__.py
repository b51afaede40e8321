"""Modules of bench/learning.py."""
