"""Servers of the Tinker and Weaver wire protocols on the local backend and engine."""
