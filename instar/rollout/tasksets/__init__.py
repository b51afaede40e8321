"""Task sets that are known by name, one per file."""
