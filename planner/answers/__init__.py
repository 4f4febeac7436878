"""Questions answered with plans: what to change, what fits, what was published."""
