"""Servers for the Tinker and Weaver wire protocols, on top of the local backend and engine."""
