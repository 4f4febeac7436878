"""`python -m trainer RUN.yaml`: one rank under torchrun, or the whole run without it."""

import sys

import typer

from planner.verbs.edge import at_the_edge
from trainer.cli import train

app = typer.Typer(add_completion=False)
app.command()(train)


def main(arguments: list[str]) -> int:
    """Train as `vramwise train` does; return the exit code."""
    return at_the_edge(
        lambda: app(args=arguments, prog_name="python -m trainer", standalone_mode=False),
        as_json="--json" in arguments,
        help_line="python -m trainer --help",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
