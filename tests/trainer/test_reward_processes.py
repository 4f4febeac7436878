"""Rewards that hang, die, fail, print and share: in the real processes that they run in."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from planner.errors import UsageError, VramwiseError
from trainer.config import RewardSection
from trainer.data import Prompt
from trainer.reward_pool import Interrupted
from trainer.rewards import load_rewards, score

TEXTS = ["4", "10", "7"]


def prompts(count=3, **fields):
    return [
        Prompt(
            token_ids=(1,), text="?", sample={"answer": "4"}, **{"conversational": False} | fields
        )
        for _ in range(count)
    ]


def asked(rewards, texts=TEXTS, **options):
    return score(
        rewards,
        prompts=prompts(len(texts)),
        texts=texts,
        completion_ids=[[1] for _ in texts],
        **options,
    )


def load(tmp_path, code, *names, **settings):
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    sections = [RewardSection(name=f"mine.py:{name}", **settings) for name in names or ("reward",)]
    return load_rewards(sections, root=tmp_path)


@pytest.mark.parametrize("boxed", ["9^{9^{9}}", "(10^{10})!"])
def test_an_answer_that_takes_for_ever_costs_only_its_sample(boxed):
    rewards = load_rewards([RewardSection(name="numeric", timeout_s=3)], root=None)
    result = asked(rewards, ["it is 4", f"it is $\\boxed{{{boxed}}}$", "so 4"])
    assert result.by_reward["numeric"] == [1, None, 1]
    assert math.isnan(result.totals[1])
    (failure,) = result.failures
    assert (failure.index, failure.error) == (1, "no answer within 3 s")


def test_a_pattern_that_takes_for_ever_costs_only_its_sample():
    section = RewardSection(name="format", options={"pattern": "(a+)+b"}, timeout_s=1)
    result = asked(load_rewards([section], root=None), ["ab", "a" * 60, "aab"])
    assert result.by_reward["format"] == [1, None, 1]


HANGS_LATER = (
    "import time\n"
    "calls = 0\n"
    "def reward(completions, **k):\n"
    "    global calls\n"
    "    calls += 1\n"
    "    if calls == 2: time.sleep(1000)\n"
    "    return [1.0] * len(completions)\n"
)


def test_a_whole_call_that_hangs_skips_its_step_and_the_next_is_asked(tmp_path):
    rewards = load(tmp_path, HANGS_LATER, timeout_s=1)
    assert asked(rewards).totals == [1, 1, 1]
    late = asked(rewards)
    assert late.bad.endswith("failed on every completion: no answer within 1 s")
    assert all(math.isnan(total) for total in late.totals)
    # a new process: its count begins again
    assert asked(rewards).totals == [1, 1, 1]


def test_a_process_that_dies_is_said_and_started_again(tmp_path):
    code = (
        "import os, signal\n"
        "def reward(completions, **k):\n"
        "    if completions == ['10']: os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    return [1.0]\n"
    )
    result = asked(load(tmp_path, code, per_sample=True))
    assert result.by_reward["reward"] == [1, None, 1]
    assert result.failures[0].error == "its process ended (signal SIGSEGV)"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return [1 / 0 for _ in completions]", r"ZeroDivisionError.*\(mine\.py line 2\)"),
        ("return [1.0]", "returned 1 value for 3 completions"),
        ("return 1.0", "returned float 1.0 for 3 completions, not a list"),
        ("return {'a': 1, 'b': 2, 'c': 3}", "returned dict .* not a list of 3 numbers"),
        ("return ['1', '2', '3']", "returned str '1' among its values"),
        ("return [[1.0], [1.0], [1.0]]", "among its values, not a number"),
        ("raise SystemExit(3)", "SystemExit"),
        ("__import__('os')._exit(7)", "exit code 7"),
    ],
)
def test_a_function_that_never_works_stops_the_run_by_name(tmp_path, body, said):
    rewards = load(tmp_path, f"def reward(completions, **k):\n    {body}\n")
    with pytest.raises(VramwiseError, match=f"the reward reward failed .*{said}") as caught:
        asked(rewards)
    assert "\n" not in caught.value.message


def test_a_function_that_has_worked_may_fail_once(tmp_path):
    code = (
        "calls = 0\n"
        "def reward(completions, **k):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls == 2: raise ConnectionError('judge')\n"
        "    return [1.0] * (len(completions) if calls < 4 else 1)\n"
    )
    rewards = load(tmp_path, code)
    assert not asked(rewards).bad
    assert "ConnectionError('judge')" in asked(rewards).bad
    assert not asked(rewards).bad
    # but a wrong number of values is never an accident
    with pytest.raises(VramwiseError, match="returned 1 value for 3"):
        asked(rewards)


def test_a_reward_that_looks_at_the_whole_batch_is_never_asked_about_a_part(tmp_path):
    code = (
        "from pathlib import Path\n"
        "def reward(completions, **k):\n"
        f"    with open({str(tmp_path / 'asked')!r}, 'a') as file: file.write(f'{{len(completions)}} ')\n"
        "    ranks = sorted(map(int, completions))\n"
        "    return [ranks.index(int(c)) / (len(ranks) - 1) for c in completions]\n"
    )
    rewards = load(tmp_path, code)
    assert asked(rewards).totals == [0, 1, 0.5]
    assert asked(rewards, ["4", "x", "7"]).bad
    assert (tmp_path / "asked").read_text() == "3 3 "


def test_a_total_without_one_functions_part_teaches_nothing(tmp_path):
    code = "def reward(completions, **k):\n    return [1 / (int(c) - 10) for c in completions]\n"
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    sections = [
        RewardSection(name="mine.py:reward", per_sample=True),
        RewardSection(name="exact"),
    ]
    totals = asked(load_rewards(sections, root=tmp_path)).totals
    assert [math.isnan(total) for total in totals] == [False, True, False]


ASYNC = (
    "import asyncio, time\n"
    "gate = asyncio.Semaphore(1)\n"
    "both = asyncio.Event()\n"
    "async def first(completions, **k):\n"
    "    async with gate:\n"
    "        await asyncio.sleep(0.01)\n"
    "    await asyncio.wait_for(both.wait(), 20)\n"
    "    return [1.0] * len(completions)\n"
    "async def second(completions, **k):\n"
    "    async with gate:\n"
    "        both.set()\n"
    "    return [2.0] * len(completions)\n"
)


def test_async_rewards_share_one_loop_for_the_run_and_run_at_the_same_time(tmp_path):
    """`first` returns only when `second` of the same file has begun; the semaphore lives over steps."""
    rewards = load(tmp_path, ASYNC, "first", "second", timeout_s=30)
    for _ in range(3):
        assert asked(rewards).totals == [3, 3, 3]


def test_files_run_at_the_same_time(tmp_path):
    """Two functions of two files, each of which waits for the other's mark."""
    for own, other in (("a", "b"), ("b", "a")):
        (tmp_path / f"{own}.py").write_text(
            "import time\nfrom pathlib import Path\n"
            "def reward(completions, **k):\n"
            f"    Path({str(tmp_path)!r}, 'mark-{own}').touch()\n"
            f"    while not Path({str(tmp_path)!r}, 'mark-{other}').exists(): time.sleep(0.01)\n"
            "    return [1.0] * len(completions)\n"
        )
    sections = [RewardSection(name=f"{name}.py:reward", timeout_s=30) for name in "ab"]
    assert asked(load_rewards(sections, root=tmp_path)).totals == [2, 2, 2]


def test_an_async_function_that_hangs_is_cancelled_alone(tmp_path):
    code = (
        "import asyncio\n"
        "calls = 0\n"
        "async def slow(completions, **k):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if completions == ['10']: await asyncio.sleep(1000)\n"
        "    return [float(calls)]\n"
    )
    result = asked(load(tmp_path, code, "slow", per_sample=True, timeout_s=1))
    assert result.by_reward["slow"] == [1, None, 3]  # one process, which lives on


def test_megabytes_of_prints_block_nothing_and_are_kept_up_to_one(tmp_path):
    code = (
        "import sys, subprocess\n"
        "print('at import ' * 100_000)\n"
        "def reward(completions, **k):\n"
        "    print('x' * 5_000_000)\n"
        "    sys.stderr.write('y' * 1_000_000)\n"
        "    return [1.0] * len(completions)\n"
    )
    rewards = load(tmp_path, code)
    rewards.pool.output.to(tmp_path / "rewards.log")
    assert asked(rewards).totals == [1, 1, 1]
    log = (tmp_path / "rewards.log").read_text()
    assert log.startswith("at import ")
    assert len(log) < 1_100_000
    assert "the rest is dropped" in log


def test_what_trl_passes_is_passed(tmp_path):
    code = (
        "def reward(prompts, completions, trainer_state, log_extra, log_metric, **columns):\n"
        "    assert prompts[0] == [{'role': 'system', 'content': 's'}, {'role': 'user', 'content': 'q'}]\n"
        "    assert completions[0] == [{'role': 'assistant', 'content': '4'}]\n"
        "    assert sorted(columns) == ['answer', 'completion_ids']\n"
        "    log_extra('words', [len(c) for c in completions])\n"
        "    log_metric('step', trainer_state.global_step)\n"
        "    return [0.0] * len(completions)\n"
    )
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    rows = [
        Prompt(
            token_ids=(1,),
            text="<system>s<user>q",
            sample={"prompt": "q", "completion": "x", "answer": "4"},
            conversational=True,
            messages=messages,
        )
    ] * 3
    result = score(
        load(tmp_path, code),
        prompts=rows,
        texts=TEXTS,
        completion_ids=[[1]] * 3,
        state={"global_step": 7, "max_steps": 9, "epoch": 0.5},
    )
    assert result.extra == {"words": [1, 1, 1]}
    assert result.metrics == {"step": 7}


def test_a_function_that_names_its_arguments_gets_only_those(tmp_path):
    code = "def reward(completions, answer):\n    return [float(c == a) for c, a in zip(completions, answer)]\n"
    assert asked(load(tmp_path, code)).totals == [1, 0, 0]


def test_options_that_a_function_does_not_take_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"train\.rewards\.reward\.options: .*'scale'"):
        load(tmp_path, "def reward(completions, answer): ...\n", options={"scale": 2})


def test_a_stop_waits_for_rewards_only_so_long(tmp_path):
    code = "import time\ndef reward(completions, **k):\n    time.sleep(1000)\n"
    with pytest.raises(Interrupted):
        asked(load(tmp_path, code), stopping=lambda: True)


def test_no_process_outlives_a_trainer_that_is_killed(tmp_path):
    """kill -9 of the trainer while its reward is deep in one long integer operation."""
    (tmp_path / "mine.py").write_text(
        "import os\nfrom pathlib import Path\n"
        "def reward(completions, **k):\n"
        f"    Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "    return [float(len(str(7 ** (10 ** 9))))] * len(completions)\n"
    )
    code = (
        "import sys; from pathlib import Path\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from tests.trainer.test_reward_processes import asked, load_rewards, RewardSection\n"
        "asked(load_rewards([RewardSection(name='mine.py:reward')], root=Path(sys.argv[1])))\n"
    )
    root = str(Path(__file__).parents[2])
    trainer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), root])
    pid = tmp_path / "pid"
    while not (pid.exists() and pid.read_text()):
        assert trainer.poll() is None
        time.sleep(0.05)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    worker = int(pid.read_text())
    for _ in range(200):
        if not _runs(worker):
            break
        time.sleep(0.05)
    assert not _runs(worker)


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
    except ProcessLookupError:
        return False


def test_closing_ends_what_a_reward_started(tmp_path):
    code = (
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        "def reward(completions, **k):\n"
        "    return [float(child.pid)] * len(completions)\n"
    )
    rewards = load(tmp_path, code)
    pid = int(asked(rewards).totals[0])
    assert _runs(pid)
    rewards.close()
    for _ in range(100):
        if not _runs(pid):
            break
        time.sleep(0.05)
    assert not _runs(pid)
    assert os.getpid() != pid
