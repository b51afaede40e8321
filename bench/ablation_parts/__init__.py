"""The tasks, the model, the training step and the settings that `bench/ablations.py` compares."""
