"""Rules: scores that are computed from the final answer, without a model."""
