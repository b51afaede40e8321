"""Servers of the Tinker and Weaver wire protocols that use the local backend and engine."""
