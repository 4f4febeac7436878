"""The kinds of failure that people paste beside CUDA messages: each told apart, each with a next step."""

import io
import json
from pathlib import Path

import pytest
import typer

import planner.verbs.explain
from benchmarks.doctor import score_explain
from planner.doctor.anchors import WORDS, shapes_of, speaks, spoken
from planner.doctor.cause import Certainty
from planner.doctor.diagnose import Diagnosis, diagnose
from planner.doctor.fix_table import MAKERS
from planner.doctor.reading import read_lines
from planner.doctor.report import diagnosis_text
from planner.doctor.scan import scan
from planner.doctor.series import Growth
from planner.doctor.titles import TITLES
from planner.units import GiB

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of 79.33 GiB of which {free} is free."
    " Including non-PyTorch memory, this process has {proc} memory in use. Of the allocated memory {alloc} is allocated by PyTorch, and"
    " {unalloc} is reserved by PyTorch but unallocated."
)
FULL = OOM.format(
    tried="1.16 GiB", free="600.00 MiB", proc="78.70 GiB", alloc="72.10 GiB", unalloc="3.80 GiB"
)


def lead(text: str, **flags: object) -> tuple[str, str]:
    failure = diagnose(text, **flags).failures[0]  # type: ignore[arg-type]
    assert failure.advice.fixes, "every answer has a next step"
    return (failure.event.kind if failure.event else "", failure.causes[0].category)


def changes(found: Diagnosis) -> str:
    return " ".join(fix.change for fix in found.failures[0].advice.fixes)


def test_precision_by_certainty_over_all_that_was_reported() -> None:
    document = score_explain()
    assert document["parsed"] == 1
    assert document["confident_wrong"] <= 0.03
    assert document["messages_right"] == 1
    assert document["reworded_right"] >= 0.97
    assert document["precision_proven"] >= 0.98
    assert document["precision_consistent"] >= 0.85
    assert document["cause_right"] >= 0.85


@pytest.mark.parametrize(
    ("kind", "category", "text"),
    [
        ("host_killed", "host_killed", "kernel: Memory cgroup out of memory: Killed process 77 (python) total-vm:9kB, anon-rss:4096kB, file-rss:0kB"),
        ("host_killed", "host_killed", "kernel: oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task=python3,pid=9,uid=0"),
        ("host_killed", "host_killed", "JobID 4711 State=OUT_OF_MEMORY ExitCode=0:125"),
        ("host_killed", "host_killed", "systemd-oomd killed 14 process(es) in this unit."),
        ("host_killed", "host_killed", "The node was low on resource: memory. Container trainer was using 61Gi, request is 8Gi."),
        ("host_killed", "host_killed", "subprocess.CalledProcessError: Command '['python', 'a.py']' died with <Signals.SIGKILL: 9>."),
        ("host_killed", "host_killed", "[2025-01-01 10:00:00] [ERROR] [launch.py:325:sigkill_handler] ['python', '-u', 'a.py'] exits with return code = -9"),
        ("host_killed", "host_killed", "RuntimeError: DataLoader worker (pid 4013) is killed by signal: Killed."),
        ("host_shm", "host_shared_memory", "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory."),
        ("host_alloc", "host_alloc", "OSError: [Errno 12] Cannot allocate memory"),
        ("killed", "killed", "container trainer exited with code 137"),
        ("worker_died", "worker_died", "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."),
        ("other_error", "not_memory", "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -6) local_rank: 1 (pid: 9) of binary: python"),
        ("other_error", "not_memory", "Traceback (most recent call last):\nKeyError: 'labels'\n[launch.py:319:sigkill_handler] Killing subprocess 12"),
        ("tms_invalid", "expandable_conflict", "[torch_memory_saver.cpp] CUresult error: 1 (invalid argument)  file=csrc/utils.h func=cu_mem_create line=169"),
        ("sglang_unbalanced", "other_process", "RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. pre_model_load_memory=40.1, local_gpu_memory=78.6, local_gpu_memory * 0.9=70.7"),
        ("driver_refused", "pinned_memory", "n1:1:2 [0] include/alloc.h:60 NCCL WARN Failed to CUDA host alloc 4194304 bytes"),
        ("hf_dispatch", "weights", "ValueError: You can't train a model that has been loaded in 8-bit or 4-bit precision with CPU or disk offload."),
    ],
)  # fmt: skip
def test_each_kind(kind: str, category: str, text: str) -> None:
    assert lead(text) == (kind, category)


@pytest.mark.parametrize(
    "text",
    [
        '"State": {"Status": "exited", "OOMKilled": false, "ExitCode": 0}',
        "[launch.py:319:sigkill_handler] Killing subprocess 3312",
        "Unable to shutdown process 12 via Signals.SIGTERM, forcefully exiting via Signals.SIGKILL",
        "pkill -9 sglang",
        "Sending process 12 closing signal SIGTERM",
        "job finished with exit code 0",
    ],
)
def test_what_is_no_kill(text: str) -> None:
    assert scan(text).errors == []


def test_a_launchers_kill_after_a_message_is_not_a_second_failure() -> None:
    text = f"{FULL}\nE failed (exitcode: -9) local_rank: 1 (pid: 9)\ncontainer exited with code 137\nKilled\n"
    found = diagnose(text)
    assert [failure.event.kind for failure in found.failures if failure.event] == ["cuda_oom"]


def test_who_says_why_wins_over_who_only_saw_it() -> None:
    text = "failed (exitcode: -9) local_rank: 0 (pid: 5)\nslurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\n"
    [failure] = diagnose(text).failures
    assert failure.event is not None
    assert failure.event.facts["killer"] == "slurm"
    assert failure.event.line == 1
    assert "--mem" in failure.advice.fixes[0].change


def test_rays_list_of_memory_users_is_read() -> None:
    text = (
        "Memory on the node (IP: 10.0.0.1, ID: 37f3bd9fa11d0000000000000000000000000000000000000000000) where the task (actor ID: 6, name=A.__init__, pid=5,"
        " memory used=1.67GB) was running was 445.48GB / 468.75GB (0.950365), which exceeds the memory usage threshold of 0.95.\n"
        "PID\tMEM(GB)\tCOMMAND\n5312\t211.81\tray::Actor\n5313\t202.20\tray::Critic.init\n"
    )
    [failure] = diagnose(text, model="Qwen/Qwen2.5-7B-Instruct", gpus=8).failures
    assert failure.causes[0].category == "host_killed"
    assert "445.48 GiB of 468.75 GiB" in failure.causes[0].formula
    assert "ray::Actor 211.81 GiB" in failure.causes[0].formula
    assert "ZeRO-3" not in " ".join(fix.change for fix in failure.advice.fixes)


def test_both_directions_of_sglangs_share() -> None:
    small = diagnose(
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: mem_fraction_static=0.7"
    )
    assert "raise --mem-fraction-static (now 0.7)" in changes(small)
    top = diagnose(
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: mem_fraction_static=0.97"
    )
    assert "raise" not in changes(top)
    run = diagnose(
        f'  File "sglang/srt/managers/scheduler.py", line 1, in event_loop\n  File "sglang/srt/layers/logits_processor.py", line 2, in forward\n{FULL}'
    )
    assert run.failures[0].causes[0].category == "sglang_runtime"
    assert "a lower --mem-fraction-static" in changes(run)
    assert "--gpu-memory-utilization" not in changes(run)


@pytest.mark.parametrize(
    ("category", "frame", "advice"),
    [
        ("vllm_sampler", "vllm/v1/sample/sampler.py", "--max-num-seqs"),
        ("weights", "vllm/model_executor/model_loader/loader.py", "--tensor-parallel-size"),
        ("vllm_runtime", "vllm/model_executor/models/qwen3.py", "a LOWER --gpu-memory-utilization"),
        ("vllm_lora_slots", "vllm/lora/layers.py", "--max-loras"),
    ],
)
def test_an_engine_gets_no_trainers_advice(category: str, frame: str, advice: str) -> None:
    text = (
        "non-default args: {'model': 'Qwen/Qwen3-8B', 'enable_lora': True, 'max_loras': 8}\n"
        "Traceback (most recent call last):\n"
        '  File "/x/vllm/v1/worker/gpu_model_runner.py", line 1, in execute_model\n'
        f'  File "/x/{frame}", line 2, in forward\n    probs = logits.softmax(dim=-1)\n{FULL}'
    )
    found = diagnose(text)
    assert found.failures[0].causes[0].category == category
    assert advice in changes(found)
    for word in ("checkpointing", "Liger", "ZeRO", "QLoRA"):
        assert word not in changes(found)


def test_overflowed_and_apple_figures() -> None:
    wsl = FULL.replace("78.70 GiB", "17179869184.00 GiB")
    [failure] = diagnose(wsl).failures
    assert failure.budget is not None
    assert failure.budget.context_bytes is None
    assert "TiB" not in diagnosis_text(diagnose(wsl))
    old = "RuntimeError: MPS backend out of memory (MPS allocated: 17.00 GB, other allocations: 512.00 MB, max allowed: 18.00 GB). Tried to allocate 1.00 GB on private pool."
    [failure] = diagnose(old).failures
    assert failure.budget is not None
    assert failure.budget.allocated_bytes == 17 * GiB
    assert failure.budget.free_bytes == GiB // 2


def test_a_request_that_was_refused_with_room_is_not_a_full_card() -> None:
    text = OOM.format(
        tried="20.00 MiB",
        free="66.43 GiB",
        proc="12.00 GiB",
        alloc="8.51 GiB",
        unalloc="856.16 MiB",
    )
    found = diagnose(text)
    assert found.failures[0].causes[0].category == "free_but_refused"
    assert found.failures[0].causes[0].certainty is Certainty.UNKNOWN
    assert "the card was full" not in diagnosis_text(found)


GROWS = "step:{n} - perf/max_memory_allocated_gb:{held} - perf/max_memory_reserved_gb:{reserved} - response_length/max:{length}"


def steps(held: list[float], reserved: list[float], length: list[int]) -> str:
    rows = zip(held, reserved, length, strict=True)
    return "\n".join(
        GROWS.format(n=n, held=a, reserved=b, length=c) for n, (a, b, c) in enumerate(rows)
    )


@pytest.mark.parametrize(
    ("category", "figures"),
    [
        ("memory_leak", steps([40, 47, 54, 61, 68], [45, 52, 60, 66, 74], [900, 870, 910, 880, 905])),
        ("longest_sample", steps([40, 55, 43, 66, 47], [66, 66, 67, 67, 70], [900, 2400, 1200, 3500, 1600])),
        ("fragmentation", steps([40, 40.2, 40.1, 40.3, 40.2], [45, 52, 60, 66, 74], [900, 870, 910, 880, 905])),
        ("memory_leak", "GPU memory: 47 -> 67 -> 87 GB, then it dies"),
        ("memory_leak", "step 1: 47 GB\nstep 2: 57 GB\nstep 3: 67 GB"),
    ],
)  # fmt: skip
def test_growth_is_fitted_from_the_logs_own_figures(category: str, figures: str) -> None:
    found = diagnose(f"{figures}\n{FULL}")
    assert found.failures[0].causes[0].category == category


def test_even_figures_are_no_growth() -> None:
    assert scan(steps([40, 41, 40, 41, 40], [45, 45, 45, 45, 45], [9, 9, 9, 9, 9])).growth is None


def test_a_leaks_slope_and_when_the_card_is_full() -> None:
    found = scan(steps([40, 47, 54, 61], [41, 48, 55, 62], [9, 9, 9, 9])).growth
    assert isinstance(found, Growth)
    assert found.per_step_bytes == pytest.approx(7e9)
    cause = (
        diagnose(steps([40, 47, 54, 61], [41, 48, 55, 62], [9, 9, 9, 9]) + "\n" + FULL)
        .failures[0]
        .causes[0]
    )
    assert "about 6 steps after the first" in cause.formula  # (79.33 * 1.0737 - 40) / 7


def test_resuming_is_its_own_phase() -> None:
    text = f'  File "train.py", line 9, in <module>\n    checkpoint = torch.load(path, map_location=device)\n{FULL}'
    found = diagnose(f"Traceback (most recent call last):\n{text}")
    assert found.failures[0].causes[0].category == "resume_copy"
    assert "map_location='cpu'" in changes(found)


def test_a_flat_master_of_all_parameters_is_no_logits() -> None:
    text = "    fp32_flat_groups = flat.float()\ntorch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 28.37 GiB (GPU 0; 79.35 GiB total capacity; 58.00 GiB already allocated; 20.00 GiB free; 58.10 GiB reserved in total by PyTorch)"
    found = diagnose(text, model="Qwen/Qwen2.5-7B")
    assert found.failures[0].causes[0].category == "optimizer_states"
    assert found.failures[0].candidates[0].bytes == 7_615_616_512 * 4


def test_several_ranks_with_different_causes_are_told_apart() -> None:
    vocab = 'File "loss.py", line 1, in cross_entropy'
    lines = [
        "[rank0]: Traceback (most recent call last):",
        f"[rank0]:   {vocab}",
        f"[rank0]: {FULL}",
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "torch/optim/adamw.py", line 2, in _init_group',
        f"[rank1]: {FULL.replace('1.16 GiB', '2.32 GiB')}",
    ]
    found = diagnose("\n".join(lines))
    assert [failure.causes[0].category for failure in found.failures] == [
        "logits_vocab",
        "optimizer_states",
    ]
    assert [
        failure.event.ranks or (failure.event.rank,) for failure in found.failures if failure.event
    ] == [("0",), ("1",)]


def test_gradients_that_stay_whole_while_they_accumulate() -> None:
    text = (
        "full fine-tuning, FSDP, 8 GPUs\ngradient_accumulation_steps: 4\nTraceback (most recent call last):\n"
        f"  loss.backward()\n{FULL.replace('1.16 GiB', '446.00 MiB')}"
    )
    cause = next(
        cause
        for cause in diagnose(text, model="Qwen/Qwen2.5-7B").failures[0].causes
        if cause.category == "unsharded_gradients"
    )
    # 7,615,616,512 parameters in 16 bit, whole and over 8 ranks
    assert "14.19 GiB whole instead of 1.77 GiB a rank" in cause.formula


REDUCED = """  File "train.py", line 88, in train_step
    loss.backward()
  File "torch/distributed/fsdp/_fully_shard/_fsdp_state.py", line 300, in _root_post_backward_final_callback
    fsdp_param_group.post_backward()
  File "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py", line 441, in post_backward
    ) = foreach_reduce(
  File "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", line 411, in foreach_reduce
    reduce_scatter_input = torch.empty(
"""
UNSHARDED = """  File "train.py", line 80, in train_step
    logits = model(tokens)
  File "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py", line 297, in unshard
    self._all_gather_result = foreach_all_gather(
  File "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", line 171, in foreach_all_gather
    all_gather_input, all_gather_output = torch.ops.fsdp.all_gather_copy_in(
"""


@pytest.mark.parametrize("sharding", ["fully_shard, FSDP2", "FSDP"])
def test_a_unit_s_gradient_is_copied_to_be_reduced(sharding: str) -> None:
    text = f"{sharding}, 8 GPUs\nTraceback (most recent call last):\n{REDUCED}{FULL}"
    failure = diagnose(text).failures[0]
    cause = failure.causes[0]
    assert (cause.category, cause.certainty) == ("reduce_scatter_copy", Certainty.CONSISTENT)
    advice = " ".join(fix.change for fix in failure.advice.fixes)
    for step in ("wrap every decoder layer", "embeddings and head apart", "reduce_dtype"):
        assert step in advice


def test_a_unit_that_finds_no_room_to_be_gathered_is_one_unit() -> None:
    text = f"fully_shard, FSDP2, 8 GPUs\nTraceback (most recent call last):\n{UNSHARDED}{FULL}"
    cause = diagnose(text).failures[0].causes[0]
    assert (cause.category, cause.certainty) == ("gather_full_params", Certainty.CONSISTENT)
    assert cause.explanation.startswith("one sharded layer is gathered")


def test_communicators_and_one_fuller_rank() -> None:
    # 79.33 - 0.1 free; 78.2 used by the process, 71.5 + 0.2 in PyTorch: 6.5 GiB are outside it
    text = "8 GPUs\n" + OOM.format(
        tried="512.00 MiB",
        free="100.00 MiB",
        proc="78.20 GiB",
        alloc="71.50 GiB",
        unalloc="200.00 MiB",
    )
    assert lead(text)[1] == "communicators"
    cause = (
        diagnose(f"full fine-tuning, FSDP\n{text}", model="Qwen/Qwen2.5-7B").failures[0].causes[0]
    )
    assert "communicators of world (8)" in cause.formula
    ranks = "\n".join(f"[Rank {n}] free_GB=1.0, used_GB={77 if n == 3 else 40}" for n in range(4))
    causes = [cause.category for cause in diagnose(f"{ranks}\n{FULL}").failures[0].causes]
    assert "one_rank_fuller" in causes


def test_workers_of_an_engine_share_its_weights() -> None:
    text = (
        "(EngineCore pid=1) INFO 09-01 10:00:10 [core.py:114] Initializing a V1 LLM engine (v0.28.0) with config: model='Qwen/Qwen3-32B', dtype=torch.bfloat16, max_seq_len=8192\n"
        + "\n".join(
            f"(Worker_TP{n} pid={n}) INFO 09-01 10:01:00 [gpu_model_runner.py:5301] Model loading took 15.4 GiB memory and 20.1 seconds"
            for n in range(4)
        )
        + "\n(Worker_TP0 pid=0) INFO 09-01 10:02:00 [gpu_worker.py:563] Available KV cache memory: 4.44 GiB"
    )
    from planner.doctor.serving import serving_report

    found = diagnose(text, gpu="rtx-4090")
    report = serving_report(found.scan.vllm, found.context)
    assert report is not None
    planned = {name: size for name, _, size in report.rows}["weights"]
    assert planned == pytest.approx(15.4 * GiB, rel=0.15)


def test_every_cause_has_a_title_that_is_a_sentence() -> None:
    assert set(MAKERS) <= set(TITLES)
    for category, title in TITLES.items():
        assert " " in title, category
        assert "_" not in title.replace("expandable_segments", ""), category


def test_an_unreadable_config_does_not_stop_the_explanation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "compose.yml"
    config.write_text("services: {web: {image: nginx}}\n", encoding="utf-8")
    app = typer.Typer()
    app.command("plan")(lambda: None)
    planner.verbs.explain.register(app)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(FULL.encode())))
    app(args=["explain", "--config", str(config), "--json"], standalone_mode=False)
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["kind"] == "cuda_oom"
    assert document["config"]["error"]
    assert "was not read" in document["notes"][0]
    assert "was not read" in captured.err


@pytest.mark.parametrize(
    "secret",
    [
        "Authorization: Bearer abcdefghijklmnopqrstuvwx",
        "https://user:hunter2secret@hub.example/x",
        "--hf-token abcdef123456789zz",
        "WANDB_API_KEY=0123456789abcdef0123",
        "token: ghp_abcdefghijklmnopqrstuvwxyz",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abcdefghijklm",
    ],
)
def test_secrets_of_all_kinds_are_blanked(secret: str) -> None:
    found = diagnose(f"{secret}\n{FULL} {secret}\nKeyError: {secret}")
    shown = diagnosis_text(found) + found.context.text + repr(found.scan.others)
    for word in ("abcdefghijkl", "hunter2", "abcdef123456789zz", "0123456789abcdef0123"):
        assert word not in shown


def test_numbers_of_tokens_are_no_secrets() -> None:
    assert "max_tokens: 4096" in diagnose("max_tokens: 4096\nnum_tokens=512").context.text


def test_lines_far_into_a_log_keep_their_numbers_and_their_traceback() -> None:
    filler = b"{'loss': 0.5, 'grad_norm': 1.0, 'epoch': 1.5}\n" * 60_000  # 2.8 MB
    stack = (
        b'Traceback (most recent call last):\n  File "x.py", line 1, in cross_entropy\n'
        + FULL.encode()
        + b"\n"
    )
    found = scan(
        io.BytesIO(filler + stack + filler + b"slurmstepd: error: Detected 1 oom_kill event\n")
    )
    assert [event.line for event in found.events] == [60_003, 120_004]
    assert any("cross_entropy" in line for line in found.events[0].stack)
    assert found.lines == 120_004


def test_a_log_that_powershell_wrote() -> None:
    text = "model: Qwen/Qwen3-8B\r\n" + FULL + "\r\n"
    for name, mark in (("utf-16-le", b"\xff\xfe"), ("utf-16-be", b"\xfe\xff")):
        [event] = scan(io.BytesIO(mark + text.encode(name))).events
        assert event.facts["tried_bytes"] == round(1.16 * GiB)


def test_usage_reports_at_every_step_leave_room_for_the_failure() -> None:
    usage = "MA 12.3 GB         Max_MA 56.0 GB         CA 60.0 GB         Max_CA 60 GB\n"
    found = scan(usage * 900 + FULL)
    assert found.events[-1].kind == "cuda_oom"
    assert len(found.events) < 60


def test_the_cheap_test_of_blocks_agrees_with_that_of_lines() -> None:
    for word in WORDS:
        assert speaks(f"x {word.upper()} 12 y")
        assert word.encode() in spoken(shapes_of(f"a 1\na 2\nx {word} 12 y".encode()))
    assert not spoken(shapes_of(b"{'loss': 0.5, 'epoch': 1.0}\n" * 9))


def test_a_server_that_starts_again_and_again_is_read_sparsely_up_to_its_last_start() -> None:
    start = (
        "(EngineCore_0 pid={0}) INFO 11-30 12:00:00 [core.py:65] Initializing a V1 LLM engine (v0.11.0) with config: model='m'\n"
        "(EngineCore_0 pid={0}) INFO 11-30 12:00:13 [r.py:2414] Model loading took 14.9889 GiB and 6.1 seconds\n"
        "(EngineCore_0 pid={0}) INFO 11-30 12:00:23 [w.py:298] Available KV cache memory: 50.07 GiB\n"
        "(EngineCore_0 pid={0}) INFO 11-30 12:00:24 [k.py:864] GPU KV cache size: {0} tokens\n"
    )
    log = "".join(start.format(number) for number in range(100_000, 106_000)).encode()
    assert len(log) > 2 << 20
    read = list(read_lines(io.BytesIO(log)))
    whole = log[: 5 << 18].count(b"\n")  # the beginning is read whole
    assert len(read) < whole + 100
    assert scan(io.BytesIO(log)).vllm.kv_tokens == 105_999


def growing(figures: list[float]) -> Diagnosis:
    lines = [
        f"step {step} loss 1.0 peak_mem: {figure:.2f} GB" for step, figure in enumerate(figures)
    ]
    return diagnose("\n".join([*lines, "CUDA out of memory. Tried to allocate 2.50 GiB."]))


def test_a_peak_that_rises_in_rare_jumps_is_a_long_sample() -> None:
    found = growing([40.0] * 6 + [44.0] * 10 + [47.0] * 30 + [60.0] * 40)
    assert found.failures[0].causes[0].category == "longest_sample"
    assert found.notes == ()
    even = growing([40.0 + step / 4 for step in range(86)])
    assert even.failures[0].causes[0].category == "memory_leak"


def test_growth_without_a_shape_is_said_to_tell_nothing() -> None:
    found = growing([40 + 7 * ((step * 37) % 11) / 10 + step / 5 for step in range(60)])
    assert found.failures[0].causes[0].category not in (
        "memory_leak",
        "longest_sample",
        "fragmentation",
    )
    assert any("cannot be told apart" in note for note in found.notes)
    flat = growing([40 + 7 * ((step * 37) % 11) / 10 for step in range(60)])
    assert flat.notes == ()


def test_a_first_step_that_allocates_states_is_no_long_sample() -> None:
    assert growing([20.0, 40.0] + [44.0] * 40).failures[0].causes[0].category != "longest_sample"
