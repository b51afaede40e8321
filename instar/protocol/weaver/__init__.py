"""Weaver's wire protocol, as its SDK 1.19 speaks it, on a workshop of our own."""
