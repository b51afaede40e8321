"""The built-in task sets, one per file."""
