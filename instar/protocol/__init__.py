"""The Tinker and Weaver wire protocols, served by our own backend and engine."""
