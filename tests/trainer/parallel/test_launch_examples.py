"""The lines of docs/training.md that start several nodes say what torchrun understands: shells and parsers read them."""

import ast
import os
import shlex
import subprocess
import textwrap
from pathlib import Path

import pytest
import typer
import yaml
from torch.distributed.run import get_args_parser

from trainer.cli import train
from trainer.parallel.launch import SHUTDOWN_S, Launch

PAGE = (Path(__file__).parents[3] / "docs" / "training.md").read_text(encoding="utf-8")
SAY = '#!/bin/sh\nprintf "%s\\n" "$@"\n'


def example(title):
    """Return the indented block behind the line that begins with `title`."""
    lines = PAGE[PAGE.index(f"\n{title}") :].splitlines()[2:]
    start = next(number for number, line in enumerate(lines) if line.startswith("    "))
    rest = lines[start:]
    end = next(n for n, line in enumerate(rest) if line and not line.startswith("    "))
    return textwrap.dedent("\n".join(rest[:end]))


def printed(script, folder, stub, **environment):
    """Return the arguments with which a shell calls the program `stub`; `scontrol` answers with two hosts."""
    for name, text in ((stub, SAY), ("scontrol", "#!/bin/sh\necho node1\necho node2\n")):
        program = folder / name
        program.write_text(text, encoding="utf-8")
        program.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", script],
        env={"PATH": path, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def torchrun(arguments):
    """Return what torchrun's own parser makes of `vramwise train ARGUMENTS`."""
    app = typer.Typer()
    app.command()(train)
    program, verb, *rest = arguments
    assert (program, verb) == ("vramwise", "train")
    given = typer.main.get_command(app).make_context("train", rest).params
    assert given["run_file"] == Path("run.yaml")
    names = ("nproc", "nodes", "node_rank", "rdzv_endpoint", "rdzv_id")
    made = Launch(**{name: given[name] for name in names}).arguments()
    return get_args_parser().parse_args([*made, "-m", "trainer", "run.yaml"])


def where(parsed):
    return parsed.nnodes, parsed.nproc_per_node


def test_slurm(tmp_path):
    script = example("SLURM, one task a node")
    set_up = dict(
        line.removeprefix("#SBATCH --").split("=")
        for line in script.splitlines()
        if line.startswith("#SBATCH")
    )
    assert set_up["ntasks-per-node"] == "1", "a launcher a node"
    assert set_up["signal"] == f"TERM@{SHUTDOWN_S}", "as long as torchrun waits for its ranks"
    nodes, gpus = set_up["nodes"], set_up["gpus-per-node"]
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": nodes, "SLURM_JOB_ID": "77"}
    options, *command = printed(script, tmp_path, "srun", **job)
    assert options == "--kill-on-bad-exit=1"
    parsed = torchrun(command)
    assert where(parsed) == (nodes, gpus)
    assert (parsed.rdzv_endpoint, parsed.rdzv_backend) == ("node1:29400", "c10d")
    assert parsed.rdzv_id == "77"


@pytest.mark.parametrize("rank", [0, 1])
def test_skypilot(tmp_path, rank):
    task = yaml.safe_load(example("SkyPilot ("))
    gpus = task["resources"]["accelerators"].partition(":")[2]
    place = {
        "SKYPILOT_NUM_GPUS_PER_NODE": gpus,
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NODE_RANK": str(rank),
        # no name of this machine
        "SKYPILOT_NODE_IPS": "10.0.0.8\n10.0.0.9",
    }
    command = printed(task["run"], tmp_path, "vramwise", **place)
    parsed = torchrun(["vramwise", *command])
    assert where(parsed) == (str(task["num_nodes"]), gpus)
    assert (parsed.node_rank, parsed.master_addr, parsed.master_port) == (rank, "10.0.0.8", 29400)


def test_ray():
    tree = ast.parse(example("Ray, a bundle a node"))
    (command,) = [
        call.args[0]
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "subprocess.run"
    ]
    made = eval(compile(ast.Expression(command), "", "eval"), {"head": "10.0.0.8", "rank": 1})
    parsed = torchrun(made)
    assert where(parsed) == ("2", "8")
    assert (parsed.node_rank, parsed.master_addr, parsed.master_port) == (1, "10.0.0.8", 29400)


def test_torchrun_itself():
    text = PAGE.replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.startswith("    torchrun ")]
    assert len(lines) == 2
    for line in lines:
        _, *arguments = shlex.split(line, comments=True)
        parsed = get_args_parser().parse_args(arguments)
        assert parsed.module
        assert (parsed.training_script, parsed.training_script_args) == ("trainer", ["run.yaml"])
        assert parsed.shutdown_timeout == SHUTDOWN_S
    assert where(parsed) == ("2", "8")
