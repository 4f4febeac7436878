"""How much a run moves and computes: what its time is made of."""
