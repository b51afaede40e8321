"""Sharded training (FSDP) with verl's own workers on Ray."""
