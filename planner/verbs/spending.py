"""The flags that say how long a run is and what a card costs, shared by `plan`, `frontier` and `recommend`."""

from typing import Annotated

import typer

Samples = Annotated[
    int | None, typer.Option("--samples", help="Samples (GRPO: prompts) of the data set: hours.")
]
Epochs = Annotated[
    float | None, typer.Option("--epochs", help="Passes over them; one if not said.")
]
TotalSteps = Annotated[
    int | None, typer.Option("--total-steps", help="Optimizer steps, instead of samples.")
]
MeanCompletion = Annotated[
    int | None,
    typer.Option("--mean-completion", help="Tokens of a mean completion (GRPO), for the time."),
]
Price = Annotated[
    str | None,
    typer.Option("--price", help="Dollars for one GPU and hour: 2.4 or 2.4-3.1; else listed ones."),
]
