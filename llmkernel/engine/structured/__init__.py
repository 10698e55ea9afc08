"""Structured output: grammars compiled beside the step loop, and the masks that they put on the logits."""
