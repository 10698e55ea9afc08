"""Speculation: what a text may go on with, guessed from the text itself, for the model to verify in one forward."""
