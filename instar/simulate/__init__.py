"""The pipeline's queueing on a virtual clock: what a run would do, without doing it."""
