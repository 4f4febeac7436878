"""The run: recipe, run file, framework laws, and how they resolve to choices."""
