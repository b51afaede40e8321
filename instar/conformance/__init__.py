"""Compares a backend with the local backend on the same cases, for `instar backends check NAME`."""
