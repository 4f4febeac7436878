"""A run's allocations played through the caching allocator: what torch reserves for a plan."""
