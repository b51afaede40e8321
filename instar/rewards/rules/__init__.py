"""Rules: scorers that compute a reward from the final answer, without a model."""
