"""Matrix products of a decoder: a weight in the form that one kernel wants, called with activations."""
