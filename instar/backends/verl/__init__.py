"""Training sharded (FSDP) through verl's own workers on Ray."""
