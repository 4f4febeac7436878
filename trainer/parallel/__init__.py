"""Training on several ranks: who they are, what each holds, and what they decide together."""
