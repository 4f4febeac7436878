"""Reference steps of other code bases, as the trace runs them."""
