"""Errors that earlier tests let pass, and mutants that no test should notice; benchmarks/mutants.py reads them."""

PLANTED: tuple[tuple[str, str, str, str], ...] = (
    (
        "DDP buckets are off",
        "planner/terms/gradients.py",
        "copies = 2 if r.sharding",
        "copies = 1 if r.sharding",
    ),
    (
        "Adafactor is free",
        "planner/terms/optimizer.py",
        "size = _factored(model, r)",
        "size = 0",
    ),
    (
        "no scratch in the embedding's backward",
        "planner/phases.py",
        "scratch = 16 * r.tokens + 4 * r.tokens * model.hidden",
        "scratch = 0",
    ),
)
"""(name, file, text, replacement)."""

EXPLAINED: dict[str, str] = {}
"""Mutant's key -> why no test can or should notice it."""
