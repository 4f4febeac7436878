"""The rows of the table: one file a term, pure functions."""
