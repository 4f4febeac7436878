"""Command line of the trainer: init, train, demo, merge, push, eval."""

import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from planner.errors import UsageError


def register(app: typer.Typer) -> None:
    """Add the trainer's verbs to `app`."""
    app.command()(train)
    app.command()(init)
    app.command()(demo)
    app.command()(merge)
    app.command()(push)
    app.command("eval")(evaluate)


def train(
    run_file: Annotated[
        Path, typer.Argument(metavar="RUN.yaml", help="model, recipe, train; or a config of TRL")
    ],
    resume: Annotated[
        bool, typer.Option("--resume", help="go on from the newest checkpoint in the output folder")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="check and plan it, for the card it names; load nothing"),
    ] = False,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="ranks on this node, one a GPU: starts torchrun")
    ] = None,
    nodes: Annotated[
        int, typer.Option("--nodes", "--nnodes", min=1, help="nodes; the same command on each")
    ] = 1,
    node_rank: Annotated[
        int | None,
        typer.Option(min=0, help="number of this node; numbered as they come unless said"),
    ] = None,
    rdzv_endpoint: Annotated[
        str | None, typer.Option(help="HOST:PORT of one node, where all meet")
    ] = None,
    rdzv_id: Annotated[
        str | None, typer.Option(help="name of the run, where several meet at one place")
    ] = None,
    token: Annotated[
        str | None, typer.Option(help="of the hub, for train.push_to_hub; HF_TOKEN unless said")
    ] = None,
    fit: Annotated[
        str | None,
        typer.Option(
            help="choose settings that meet a budget: '24GiB, <6h, <$5', any of the three"
        ),
    ] = None,
    price: Annotated[
        str | None, typer.Option(help="with --fit: dollars for one GPU and hour; else listed ones")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Train what RUN.yaml says: SFT or GRPO, planned, checked at step 0, and logged.

    A TRL 1.16 config (YAML of `trl sft|grpo --config`, a shell line, an SFT script) trains as well: a line
    says what becomes of each of its fields. Reward functions named as FILE.py:FUNCTION are imported: this
    runs that file's code. On several GPUs: --nproc, or torchrun --nproc-per-node N -m trainer RUN.yaml.
    """
    if price is not None and fit is None:
        raise UsageError(f"--price: {price} has no effect without --fit")
    if dry_run:
        from trainer.check_run import check_run

        ranks = (nproc or 1) * nodes if nproc is not None or nodes > 1 else None
        checked = check_run(run_file, say=_say, budget=fit, price=price, ranks=ranks)
        _print(checked, as_json=json_output)
        return
    if token is not None:
        os.environ["HF_TOKEN"] = token
    if (nproc or 1) > 1 or nodes > 1:
        from trainer.parallel.launch import Launch, launch

        how = Launch(
            nproc=nproc or 1,
            nodes=nodes,
            node_rank=node_rank,
            rdzv_endpoint=rdzv_endpoint,
            rdzv_id=rdzv_id,
        )
        options = [*(["--resume"] if resume else []), *(["--json"] if json_output else [])]
        for flag, value in (("--fit", fit), ("--price", price)):
            options += [flag, value] if value is not None else []
        raise typer.Exit(launch(how, run_file, options))
    _train_here(run_file, resume=resume, as_json=json_output, budget=fit, price=price)


def _train_here(
    run_file: Path, *, resume: bool, as_json: bool, budget: str | None, price: str | None
) -> None:
    """Train in this process: the whole run, or one rank of it."""
    from trainer.parallel.worker import joined
    from trainer.run import report, train_run
    from trainer.say import silent

    with joined(run_file, as_json=as_json) as ranks:
        result = train_run(
            run_file,
            resume=resume,
            say=_say if ranks.first else silent,
            ranks=ranks,
            budget=budget,
            price=price,
        )
    if ranks.first:
        _print(report(result), as_json=as_json)
    if result.stopped_by is None:
        return
    if ranks.first:
        several = f" --nproc {ranks.size}" if ranks.several else ""
        typer.echo(
            f"stopped by {signal.Signals(result.stopped_by).name} after step {result.steps}; "
            f"go on with: vramwise train {run_file}{several} --resume",
            err=True,
        )
    raise typer.Exit(128 + result.stopped_by)


def init(
    model: Annotated[
        str, typer.Option("--model", help="catalogue name, folder or hub id: llama-3.1-8b")
    ],
    task: Annotated[str, typer.Option("--task", help="sft or grpo")] = "sft",
    gpu: Annotated[str | None, typer.Option("--gpu", help="the card: rtx-4090, h100 ...")] = None,
    vram: Annotated[str | None, typer.Option("--vram", help="or its memory: 24GiB")] = None,
    host_ram: Annotated[str | None, typer.Option("--host-ram", help="host memory: 64GiB")] = None,
    method: Annotated[
        str | None, typer.Option("--method", help="full, lora or qlora; default: lora, else qlora")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="the file to write")] = Path("run.yaml"),
    json_output: Annotated[
        bool, typer.Option("--json", help="print the same as one JSON document; write nothing")
    ] = False,
) -> None:
    """Write a commented run.yaml for a task and a card, with settings that the planner says fit."""
    from planner.run.recipe import MachineSection
    from trainer.init_file import METHODS, start, write

    section = MachineSection(
        **{k: v for k, v in {"gpu": gpu, "vram": vram, "host_ram": host_ram}.items() if v}
    )
    made = start(task, model, section, methods=(method,) if method else METHODS)
    if json_output:
        _print(made.to_dict(), as_json=True)
        return
    write(made, out)
    typer.echo(
        f"wrote {out}: {made.tried[-1].label}, planned peak {made.plan.peak_bytes / 2**30:.2f} GiB in "
        f"{made.plan.peak_phase}"
    )
    _say(f"next: vramwise train {out} --dry-run")


def demo(
    output: Annotated[Path, typer.Option(help="folder for logs and checkpoints")] = Path(
        "runs/demo"
    ),
    steps: Annotated[
        int | None, typer.Option(min=20, help="GRPO steps; the model's own number unless said")
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    model: Annotated[
        str,
        typer.Option(help="smollm2, small (made on the spot), or auto: smollm2 if it is to be had"),
    ] = "auto",
    nproc: Annotated[
        int | None,
        typer.Option(min=2, help="train on so many ranks too, beside three seeds on one rank"),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Plan, trace and train a small model by GRPO on this machine; minutes, no GPU needed."""
    if nproc is not None:
        from trainer.demo_ranks import run_demo_ranks

        if seed:
            raise UsageError(f"--seed: {seed} has no effect with --nproc, which runs seeds 0 to 2")
        document = run_demo_ranks(output=output, steps=steps, model=model, nproc=nproc, say=_say)
        _print(document, as_json=json_output)
        return
    from trainer.demo import run_demo

    _print(
        run_demo(output=output, steps=steps, seed=seed, model=model, say=_say),
        as_json=json_output,
    )


def push(
    source: Annotated[Path, typer.Argument(help="a run's output folder, or one checkpoint")],
    repo: Annotated[
        str | None, typer.Option(help="USER/NAME; the run file's train.push_to_hub unless said")
    ] = None,
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="of a repository that is made")
    ] = None,
    merged: Annotated[
        bool | None, typer.Option("--merged/--adapters", help="the whole model, or adapters alone")
    ] = None,
    token: Annotated[str | None, typer.Option(help="of the hub; HF_TOKEN unless said")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Push the newest checkpoint of a run to the hub, with a card: settings, planned beside measured memory."""
    from trainer.push import push_again
    from trainer.run import quiet

    quiet()
    document = push_again(source, repo=repo, private=private, merged=merged, token=token)
    _print(document, as_json=json_output)


def merge(
    source: Annotated[Path, typer.Argument(help="a run's output folder, or one checkpoint")],
    output: Annotated[Path, typer.Argument(help="new folder for the merged model")],
    base: Annotated[
        str | None, typer.Option(help="base model; default: the one of the run")
    ] = None,
    dtype: Annotated[str, typer.Option(help="dtype of the merged weights")] = "bf16",
    json_output: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Fold the adapters of a checkpoint into its base model and write the whole model."""
    from trainer.merge import merge_checkpoint

    _print(merge_checkpoint(source, output, base=base, dtype=dtype), as_json=json_output)


def evaluate(
    checkpoint: Annotated[
        str, typer.Argument(help="a run's output, one checkpoint, a model's folder, or a hub id")
    ],
    task: Annotated[
        str | None, typer.Option(help="gsm8k, arithmetic or reasoning-gym/TASK")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="a file or folder of samples")] = None,
    split: Annotated[str | None, typer.Option(help="of the data; gsm8k: test")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="the first so many samples")] = None,
    reward: Annotated[
        list[str] | None, typer.Option(help="what judges completions; the first says what passes")
    ] = None,
    pass_at: Annotated[float | None, typer.Option(help="a reward from here on passes")] = None,
    generations: Annotated[int | None, typer.Option(min=1, help="completions a sample")] = None,
    k: Annotated[list[int] | None, typer.Option(min=1, help="the k of pass@k")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 = greedy")] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option(min=0)] = None,
    engine: Annotated[
        str | None, typer.Option(help="transformers, vllm-shared or vllm-push")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32")] = None,
    base: Annotated[str | None, typer.Option(help="base model of adapters")] = None,
    prompt_length: Annotated[int | None, typer.Option(min=1)] = None,
    completion_length: Annotated[int | None, typer.Option(min=1)] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="sequences at once")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    completions: Annotated[
        Path | None, typer.Option(help="write prompts and completions here, as JSON lines")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Evaluate CHECKPOINT: pass@k and rewards of completions, or the perplexity of given text.

    Without --task and --data the run's own validation set. FILE.py:FUNCTION rewards run that file's code.
    """
    from trainer.evaluate import EvalSettings
    from trainer.evaluate import evaluate as run_evaluation
    from trainer.evaluation import line_of
    from trainer.run import quiet

    quiet()
    settings = EvalSettings(
        task=task,
        data=data,
        split=split,
        limit=limit,
        rewards=tuple(reward or ()),
        pass_at=pass_at,
        generations=generations,
        k=tuple(k or ()),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        engine=engine,
        dtype=dtype,
        base=base,
        prompt_length=prompt_length,
        completion_length=completion_length,
        rows=rows,
        seed=seed,
        completions=completions,
    )
    document = run_evaluation(checkpoint, settings, say=_say)
    _print(document, as_json=json_output)
    if not json_output:
        typer.echo(line_of(document["figures"]))


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _print(document: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        import json

        typer.echo(json.dumps(document))
        return
    for key, value in document.items():
        if key != "schema_version" and not isinstance(value, list | dict):
            typer.echo(f"{key}: {value}")
