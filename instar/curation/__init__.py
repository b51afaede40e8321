"""Find sessions that should not be trained on."""
