"""Runs model-written code isolated from the machine."""
