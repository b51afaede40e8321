"""Recorded data as files: out of a store, into one, and as other programs read it."""
