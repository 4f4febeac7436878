"""A command without what starts it: wrappers and launchers off, GPU counts and sharding words kept."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from planner.importers.launch import visible_devices
from planner.importers.settings import as_int
from planner.importers.shell import parse_shell

_WRAPPERS = frozenset(
    [
        "nohup",
        "env",
        "exec",
        "sudo",
        "time",
        "setsid",
        "stdbuf",
        "ionice",
        "nice",
        "numactl",
        "taskset",
        "timeout",
        "uv",
        "poetry",
        "pdm",
        "pipenv",
        "conda",
        "micromamba",
        "singularity",
        "apptainer",
        "srun",
        "mpirun",
        "mpiexec",
        "ray",
        "nsys",
        "bash",
        "sh",
        "xargs",
        "enroot",
        "dlprof",
    ]
)
_BARE = frozenset(
    [
        "standalone",
        "no_python",
        "no-python",
        "run_path",
        "use_deepspeed",
        "use_fsdp",
        "multi_gpu",
        "cpu",
        "mps",
        "tpu",
        "quiet",
        "debug",
        "use_megatron_lm",
        "use_parallelism_config",
        "same_network",
        "no_local_rank",
        "save_pid",
        "force_multi",
        "elastic_training",
        "bind_cores_to_rank",
        "exclusive",
        "unbuffered",
        "label",
        "overlap",
        "pty",
        "no-wait",
        "verbose",
        "no-sync",
        "frozen",
        "isolated",
        "no-container-entrypoint",
        "container-writable",
        "no-capture-output",
        "nv",
        "cleanenv",
        "u",
        "B",
        "O",
        "multi-gpu",
        "use-deepspeed",
        "use-fsdp",
        "no-dev",
        "active",
        "all-extras",
        "use_env",
        "allow-run-as-root",
        "oversubscribe",
    ]
)
"""Launchers' flags that take no value."""
_RUNS = frozenset(("run", "exec", "submit", "job", "launch", "profile"))
_INSIDE = frozenset(
    (
        "python",
        "python3",
        "torchrun",
        "accelerate",
        "deepspeed",
        "llamafactory-cli",
        "swift",
        "axolotl",
        "bash",
        "sh",
    )
)
"""Where a container's own command starts after its image."""
_DISTRIBUTED = re.compile(
    r"^torch\.distributed\.(?:run|launch)$|^accelerate\.commands\.launch$|^deepspeed\.launcher\."
)


@dataclass(kw_only=True)
class Started:
    """The program that a command starts."""

    program: str
    """A script's path, a module (python -m) or a console command."""
    arguments: list[str]
    is_module: bool = False
    processes: int | None = None
    """Of one node."""
    nodes: int = 1
    total: int | None = None
    """Processes of all nodes together."""
    config_file: str = ""
    """accelerate's."""
    launcher: list[str] = field(default_factory=list)
    """The words before the program."""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The program's last path component."""
        return Path(self.program).name

    @property
    def gpus(self) -> int | None:
        """How many GPUs the launcher starts processes on, or None."""
        if self.total:
            return self.total
        each = self.processes or as_int(self.environment.get("NPROC_PER_NODE"))
        if each:
            nodes = self.nodes if self.nodes > 1 else as_int(self.environment.get("NNODES")) or 1
            return each * nodes
        return visible_devices(self.environment) if self.launches_many else None

    @property
    def launches_many(self) -> bool:
        """Whether a launcher starts a process for each GPU."""
        names = {Path(word).name for word in self.launcher}
        own = self.name in ("llamafactory-cli", "lmf")
        return (
            own
            or bool(names & {"torchrun", "accelerate", "deepspeed"})
            or any(_DISTRIBUTED.match(word) for word in self.launcher)
        )


def started(command: list[str], environment: dict[str, str] | None = None) -> Started | None:
    """Return what a command line starts; None where only a launcher is left."""
    found = Started(program="", arguments=[], environment=dict(environment or {}))
    rest = list(command)
    for _ in range(12):
        if not rest:
            return None
        name = Path(rest[0]).name
        if re.fullmatch(r"[A-Za-z_]\w*=.*", rest[0], re.DOTALL):
            key, _, value = rest.pop(0).partition("=")
            found.environment[key] = value
        elif name in ("bash", "sh") and (inner := _inner(rest)):
            rest = inner
        elif name in ("bash", "sh") and len(rest) > 1 and rest[1].endswith(".sh"):
            break
        elif name in ("docker", "podman", "nerdctl"):
            inside = next((i for i, word in enumerate(rest) if Path(word).name in _INSIDE), None)
            if inside is None:
                break
            rest = rest[inside:]
        elif name in _WRAPPERS:
            rest = _unwrapped(found, rest)
        elif name in ("torchrun", "deepspeed", "accelerate", "composer", "colossalai"):
            rest = _launched(found, rest)
        elif re.fullmatch(r"(?:python|pypy)[\d.]*", name):
            rest = _python(found, rest)
            if found.program:
                found.arguments = rest
                return _submitted(found) or found
        else:
            break
        if found.program:
            found.arguments = rest
            return found
    found.program, found.arguments = rest[0], rest[1:]
    return found


def _submitted(found: Started) -> Started | None:
    """Return what a script of one's own starts elsewhere: python submit.py --gpus 8 -- python train.py."""
    if "--" not in found.arguments:
        return None
    place = found.arguments.index("--")
    after = found.arguments[place + 1 :]
    while "&&" in after:
        after = after[after.index("&&") + 1 :]
    if not after or Path(after[0]).name not in _INSIDE:
        return None
    inside = started(after, found.environment)
    if inside is not None and inside.gpus is None:
        _flags_off(inside, [word for word in found.arguments[:place] if inside.program])
    return inside


_IDLE = (
    "echo",
    "sleep",
    "wait",
    "cd",
    "ls",
    "rm",
    "cp",
    "mkdir",
    "cat",
    "tail",
    "date",
    "exit",
    "true",
)
"""Commands that start no run, before or after the one of bash -c "..."."""


def _inner(words: list[str]) -> list[str]:
    """Return the command of bash -c "...", the last one where there are several."""
    for index, word in enumerate(words[1:-1], 1):
        if word in ("-c", "-lc", "-ec", "-xc"):
            commands = parse_shell(words[index + 1]).commands
            working = [each for each in commands if each[0] not in _IDLE]
            return (working or commands or [[]])[-1]
    return []


def _flags_off(found: Started, words: list[str]) -> list[str]:
    """Take a launcher's own flags off, reading what they say of processes; return what is left."""
    index = 0
    while index < len(words):
        word = words[index]
        if word == "--":
            return words[index + 1 :]
        if not re.match(r"^--?[A-Za-z]", word):
            break
        word = re.sub(r"^(-[A-Za-z])(?=\d+$)", r"\1=", word)  # srun -N1
        key, equals, value = word.lstrip("-").partition("=")
        index += 1
        if key in ("m", "module"):
            if index < len(words):
                found.program, found.is_module = value or words[index], True
                index += 0 if equals else 1
            break
        if (
            not equals
            and key not in _BARE
            and index < len(words)
            and not words[index].endswith(".py")
        ):
            value = words[index]
            if not value.startswith("--"):
                index += 1
        _count(found, key, value)
    return words[index:]


def _count(found: Started, key: str, value: str) -> None:
    name = key.replace("-", "_")
    number = as_int(value.split(":")[-1] if name in ("nnodes", "N") else value)
    if name in ("nproc_per_node", "num_gpus", "gpus_per_node", "ntasks_per_node", "gpus"):
        found.processes = number or found.processes
    elif name in ("num_processes", "np"):
        found.total = number or found.total
    elif name in ("nnodes", "num_nodes", "nodes", "N"):
        found.nodes = number or found.nodes
    elif name in ("n", "nproc") and "torchrun" in {Path(word).name for word in found.launcher}:
        found.processes = number or found.processes
    elif name == "include" and ":" in value:
        found.processes = len(value.split(":", 1)[1].split(","))
    elif name == "config_file":
        found.config_file = value
    elif name in ("num_machines",):
        pass  # num_processes counts all machines


def _launched(found: Started, words: list[str]) -> list[str]:
    name = Path(words[0]).name
    rest = words[1:]
    if name in ("accelerate", "colossalai"):
        if not rest or rest[0] not in ("launch", "run"):
            found.program = words[0]
            return rest
        found.launcher.append(words[0])
        rest = rest[1:]
    before = rest
    found.launcher.append(words[0])
    rest = _flags_off(found, rest)
    found.launcher += before[: len(before) - len(rest)]
    if not found.program and rest:
        found.program, rest = rest[0], rest[1:]
    return rest


def _python(found: Started, words: list[str]) -> list[str]:
    rest = _flags_off(found, words[1:])
    if found.is_module and _DISTRIBUTED.match(found.program):
        launcher, found.program, found.is_module = found.program, "", False
        found.launcher += [
            "torchrun" if launcher.startswith("torch") else launcher.split(".")[0],
            launcher,
        ]
        before = rest
        rest = _flags_off(found, rest)
        found.launcher += before[: len(before) - len(rest)]
    if not found.program and rest:
        found.program, rest = rest[0], rest[1:]
    return rest


def _unwrapped(found: Started, words: list[str]) -> list[str]:
    """Return the command after one wrapper and its own flags and words."""
    name, rest = Path(words[0]).name, words[1:]
    if name == "ray":
        if rest[:2] == ["job", "submit"]:
            return (
                rest[rest.index("--") + 1 :]
                if "--" in rest
                else _flags_off(Started(program="", arguments=[]), rest[2:])
            )
        found.program = words[0]
        return rest
    own = Started(program="", arguments=[]) if name not in ("srun", "mpirun", "mpiexec") else found
    own.launcher = [*own.launcher, name] if own is found else [name]
    while rest and rest[0] in _RUNS:
        rest = rest[1:]
    rest = _flags_off(own, rest)
    if own is not found and own.program:  # uv run -m module
        found.program, found.is_module = own.program, True
    if name in ("timeout", "taskset") and rest:
        rest = rest[1:]
    if name in ("singularity", "apptainer") and rest:
        rest = rest[1:]  # the image
    return rest


def slurm_gpus(text: str) -> int | None:
    """Return how many GPUs the #SBATCH lines ask for, all nodes together, or None."""
    lines = " ".join(re.findall(r"^#SBATCH\s+(.*)$", text, re.MULTILINE))
    each = re.search(
        r"--gres[= ]gpu:(?:[\w.-]+:)?(\d+)|--gpus-per-node[= ](?:[\w.-]+:)?(\d+)", lines
    )
    nodes = re.search(r"(?:--nodes[= ]|-N\s*)(\d+)", lines)
    if each:
        return int(each.group(1) or each.group(2)) * (int(nodes.group(1)) if nodes else 1)
    whole = re.search(r"(?:--gpus[= ]|-G\s*)(?:[\w.-]+:)?(\d+)", lines)
    return int(whole.group(1)) if whole else None
