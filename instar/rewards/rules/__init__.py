"""Rules: scores that a final answer gets without asking anyone."""
