"""Weaver's wire protocol as its SDK 1.19 sends it."""
