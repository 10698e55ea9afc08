"""llmkernel: a continuous-batching inference engine behind a notebook."""

__version__ = "0.1.0"
