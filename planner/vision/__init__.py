"""Images in a run: how processors cut them, and what the tower keeps of them."""
