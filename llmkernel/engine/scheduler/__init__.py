"""Which tokens of which request are computed in a step."""
