"""The model implementations that the worker can run."""
