"""What `profile run` puts first on a child's PYTHONPATH; standard library only."""
