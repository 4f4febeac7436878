"""One layer operation by operation: a small autograd in bytes."""
