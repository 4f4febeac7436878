"""CUDA's caching allocator, simulated: one allocator for the planner and the trace."""
