"""Exports recorded sessions to files, imports them, and converts them for other trainers."""
