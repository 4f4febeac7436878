"""`vramwise train --nproc`: torchrun is started, its ends are told in one line, nodes meet at one place."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml

from planner.errors import UsageError, VramwiseError
from tests.trainer.parallel.gloo import free_port
from trainer import checkpoint as checkpoints
from trainer.parallel.launch import Launch
from trainer.parallel.worker import world_size

pytestmark = pytest.mark.xdist_group("ranks")
ROOT = Path(__file__).parents[3]


@pytest.fixture
def run_file(document, tmp_path):
    """Return the path of an SFT run of many steps, a checkpoint each."""
    rows = [{"prompt": f"{n}+{n}=", "completion": f"{2 * n}"} for n in range(10, 42)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    made = document(
        recipe={"task": "sft", "context": 24, "micro_batch_size": 2, "sharding": "fsdp2"},
        train={
            "dataset": "rows.jsonl",
            "output": "out",
            "rewards": [],
            "prompts_per_step": 4,
            "steps": 100_000,
            "save_every": 1,
        },
    )
    for key in ("num_generations", "prompt_length", "completion_length"):
        del made["recipe"][key]
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(made), encoding="utf-8")
    return path


def command(*arguments, module=("app.cli", "train")):
    """Start a command line in this repository; both of its streams are kept."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    program, *verb = module
    return subprocess.Popen(
        [sys.executable, "-m", program, *verb, *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process, limit_s=400.0):
    """Return (exit code, stdout, what stderr says beside steps and rows)."""
    try:
        out, err = process.communicate(timeout=limit_s)
    finally:
        process.kill()
    noise = ("step ", "32 of 32", "recipe: ", "forecast: ")
    return (
        process.returncode,
        out,
        [li for li in err.splitlines() if li and not li.startswith(noise)],
    )


def ranks_of(process):
    """Return the processes of a launcher's ranks, the first rank first."""
    found = [
        each
        for each in psutil.Process(process.pid).children(recursive=True)
        if "trainer" in each.cmdline()
    ]
    return sorted(found, key=lambda each: int(each.environ()["RANK"]))


def wait_for(condition, process, limit_s=400.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def saved(output):
    return [each.step for each in checkpoints.checkpoints(output)]


def test_a_killed_rank_is_named_and_a_stopped_run_goes_on(run_file):
    output = run_file.parent / "out"
    process = command(run_file, "--nproc", 2)
    wait_for(lambda: saved(output), process)
    victim = random.Random(time.time()).choice(ranks_of(process))
    rank, pid = int(victim.environ()["RANK"]), victim.pid
    victim.kill()
    code, _, said = end(process)
    step = saved(output)[-1]
    assert code == 1
    assert said == [
        f"error: rank {rank} (process {pid}) was killed by SIGKILL; step {step} is saved, --resume goes on from it",
        "hint: out of host memory? the kernel's log says so",
    ]
    # SIGTERM to the launcher: the step under way is done and saved
    process = command(run_file, "--nproc", 2, "--resume", "--json")
    wait_for(lambda: saved(output)[-1] > step + 1, process)
    process.send_signal(signal.SIGTERM)
    code, out, said = end(process)
    last = saved(output)[-1]
    assert code == 128 + signal.SIGTERM
    assert said == [
        f"stopped by SIGTERM after step {last}; go on with: vramwise train {run_file} --nproc 2 --resume"
    ]
    assert json.loads(out)["steps"] == last
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(last)), "one rank writes, once a step"


@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True], ids=["c10d", "static"])
def test_two_launchers_on_one_host_are_two_nodes(run_file, static):
    made = yaml.safe_load(run_file.read_text())
    made["train"] |= {"steps": 4, "save_every": 2}
    run_file.write_text(yaml.safe_dump(made))
    place = ["--nodes", 2, "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    nodes = [
        command(run_file, "--nproc", 1, *place, *(["--node-rank", k] if static else []))
        for k in range(2)
    ]
    ends = [end(process) for process in nodes]
    assert [code for code, *_ in ends] == [0, 0], ends
    assert sorted(bool(out) for _, out, _ in ends) == [False, True], "one rank prints"
    assert saved(run_file.parent / "out") == [2, 4]


@pytest.mark.slow
def test_two_agents_of_torchrun_itself_are_two_nodes(run_file):
    made = yaml.safe_load(run_file.read_text())
    made["train"] |= {"steps": 4, "save_every": 2}
    run_file.write_text(yaml.safe_dump(made))
    place = f"--nnodes=2 --nproc-per-node=1 --rdzv-id=two --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{free_port()}"
    agent = ("torch.distributed.run", *place.split(), "-m", "trainer")
    ends = [end(process) for process in [command(run_file, module=agent) for _ in range(2)]]
    assert [code for code, *_ in ends] == [0, 0], ends
    assert sorted(bool(out) for _, out, _ in ends) == [False, True], "one rank prints"
    assert saved(run_file.parent / "out") == [2, 4]


@pytest.mark.slow
def test_a_rank_killed_on_one_node_ends_the_other_node(run_file):
    output = run_file.parent / "out"
    place = ["--nodes", 2, "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    nodes = [command(run_file, "--nproc", 1, *place, "--node-rank", k) for k in range(2)]
    wait_for(lambda: saved(output), nodes[0])
    (victim,) = ranks_of(nodes[1])
    victim.kill()
    (code, _, said), (other_code, _, other_said) = [end(process) for process in nodes]
    assert (code, other_code) == (1, 1)
    assert said[0] == (
        f"error: rank 1 of 2 on {socket.gethostname()} is gone: killed, or its machine is lost"
    )
    assert f"rank 1 (process {victim.pid}) was killed by SIGKILL" in other_said[0]
    assert saved(output)


@pytest.mark.slow
def test_torchrun_itself_starts_the_module(run_file):
    made = yaml.safe_load(run_file.read_text())
    made["train"] |= {"steps": 2}
    run_file.write_text(yaml.safe_dump(made))
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "trainer")
    code, out, _ = end(command(run_file, module=torchrun))
    assert code == 0
    assert "steps: 2" in out
    assert saved(run_file.parent / "out") == [1, 2]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"nproc": 2, "nodes": 2}, "--nodes: 2 nodes have no place to meet"),
        ({"nproc": 2, "node_rank": 1}, "--node-rank: 1 has no meaning with one node"),
        ({"nproc": 2, "rdzv_endpoint": "a:1"}, "--rdzv-endpoint: a:1 has no meaning with one node"),
        ({"nproc": 2, "nodes": 2, "rdzv_endpoint": "a:99999"}, "--rdzv-endpoint: 'a:99999' is not allowed"),
        ({"nproc": 2, "nodes": 2, "rdzv_endpoint": "a:1", "node_rank": 2}, "--node-rank: 2 is not allowed"),
    ],
)  # fmt: skip
def test_nodes_that_cannot_meet_are_refused(how, said):
    with pytest.raises(UsageError, match=said):
        Launch(**how).arguments()


def test_inside_torchrun_no_other_one_is_started(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="--nproc: this is a rank of torchrun already"):
        Launch(nproc=2).arguments()
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match="WORLD_SIZE is 2, but RANK is not set"):
        world_size()
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(UsageError, match="WORLD_SIZE: 'two' is no number of ranks"):
        world_size()


@pytest.mark.parametrize("node_rank", [None, 0], ids=["c10d", "static"])
def test_a_port_in_use_is_named(node_rank, monkeypatch):
    monkeypatch.setattr("trainer.parallel.launch.PROBE_S", 1.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        place = f"127.0.0.1:{other.getsockname()[1]}"
        how = Launch(nproc=1, nodes=2, rdzv_endpoint=place, node_rank=node_rank)
        with pytest.raises(
            VramwiseError, match=r"--rdzv-endpoint: port \d+ of 127.0.0.1 is in use"
        ):
            how.arguments()


def test_another_agents_store_is_no_stranger():
    port = free_port()
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    how = Launch(nproc=1, nodes=2, rdzv_endpoint=f"127.0.0.1:{port}")
    assert how.arguments()[-1] == f"--rdzv-endpoint=127.0.0.1:{port}"
    del store


def test_torchrun_gets_its_own_flags():
    place = f"127.0.0.1:{free_port()}"
    made = Launch(nproc=8, nodes=2, rdzv_endpoint=place, rdzv_id="grpo-1").arguments()
    assert made == [
        "--nproc-per-node=8",
        "--shutdown-timeout=600",
        "--nnodes=2",
        "--rdzv-id=grpo-1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={place}",
    ]
    assert Launch(nproc=8).arguments()[-1] == "--standalone"
