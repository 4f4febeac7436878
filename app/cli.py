"""The one console script: gathers every package's verbs and maps errors to exit codes.

Exit codes: 0 ok, 1 failure, 2 usage, 3 does not fit (only with --check), 4 no GPU,
5 missing extra; 130 interrupted. `profile run` ends with the exit code of the command it ran.
"""

import importlib
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import planner.families
import planner.verbs.accuracy
from planner.errors import MissingExtraError
from planner.models.spec import ModelSpec
from planner.verbs.edge import at_the_edge
from planner.verbs.typed import rejoined

if TYPE_CHECKING:
    from planner.accuracy.score import Accuracy

VERB_MODULES = (
    "planner.verbs.plan",
    "planner.verbs.recommend",
    "planner.verbs.frontier",
    "planner.verbs.look",
    "planner.verbs.frameworks",
    "planner.verbs.accuracy",
    "planner.verbs.explain",
    "trainer.trace_cli",
    "profiler.cli",
    "trainer.cli",
    "trainer.quantize.verb",
)

PANELS = ("Plan", "Explain", "Train", "Measure", "Look")
"""Parts of the help, in order: it opens with what most people come for."""

app = typer.Typer(
    name="vramwise",
    help="Will it fit? Plan, measure and train: every byte of GPU memory of LLM fine-tuning, GRPO and serving.\n\n"
    "Start with: vramwise plan llama-3.1-8b --gpu rtx-4090 --method qlora\n\n"
    "Exit codes: 0 ok, 1 failure, 2 usage, 3 does not fit (with --check), 4 no GPU, 5 missing extra.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        try:
            typer.echo(f"vramwise {version('vramwise')}")
        except PackageNotFoundError:
            typer.echo("vramwise (not installed)")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Take the options that come before a verb."""


@app.command("app", rich_help_panel="Look")
def start_app(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to serve on.")] = 8501,
    address: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    headless: Annotated[bool, typer.Option(help="Do not open a browser.")] = False,
) -> None:
    """Open the "will it fit?" app in a browser."""
    from app.serve import serve

    raise typer.Exit(serve(port=port, address=address, headless=headless))


@app.command("completion", rich_help_panel="Look")
def completion(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish.")] = "bash",
) -> None:
    """Print the completion of a shell: vramwise completion bash >> ~/.bashrc"""
    from typer.completion import get_completion_script

    from planner.names import word_of

    name = word_of("shell", shell, ["bash", "zsh", "fish"], {})
    typer.echo(
        get_completion_script(prog_name="vramwise", complete_var="_VRAMWISE_COMPLETE", shell=name)
    )


def _register_verbs() -> None:
    """Add the verbs of planner, profiler and trainer; none of them imports torch to do so."""
    for name in VERB_MODULES:
        importlib.import_module(name).register(app)
    for command in app.registered_commands:
        if not isinstance(command.rich_help_panel, str):
            command.rich_help_panel = "Train"
    app.registered_commands.sort(key=lambda each: PANELS.index(str(each.rich_help_panel)))
    planner.families.outside_builder = _from_module_tree
    planner.verbs.accuracy.score_traces = _score_traces


def _from_module_tree(config: Mapping[str, Any]) -> ModelSpec:
    """Plan an architecture the planner does not know from transformers' own module tree."""
    from profiler.meta_model import model_spec_from_transformers

    return model_spec_from_transformers(config)


def _score_traces(files: list[Path]) -> "Accuracy":
    """Score fake-tensor traces against published runs."""
    try:
        from profiler.trace_accuracy import score
    except ModuleNotFoundError as error:
        raise MissingExtraError("the trace tier", "train") from error
    return score(files)


_register_verbs()


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code; every failure is one line and a hint."""
    arguments = rejoined(sys.argv[1:] if arguments is None else arguments)
    return at_the_edge(
        lambda: app(args=arguments, prog_name="vramwise", standalone_mode=False),
        as_json="--json" in arguments,
        help_line=f"vramwise {_verb(arguments)}--help",
    )


def _verb(arguments: list[str]) -> str:
    names = {command.name for command in app.registered_commands}
    names |= {group.name for group in app.registered_groups}
    return f"{arguments[0]} " if arguments and arguments[0] in names else ""


def run() -> None:
    """Console script entry."""
    sys.exit(main())


if __name__ == "__main__":
    run()
