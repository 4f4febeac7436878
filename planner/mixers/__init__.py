"""Token mixers: one file a kind, and a registry that has all of them."""
