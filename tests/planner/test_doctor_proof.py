"""What "proven" takes: a figure of the plan or of the engine's own check, never a size that happens to match."""

import pytest

from planner.doctor.cause import Cause, Certainty
from planner.doctor.diagnose import diagnose

CARD = "GPU 0 has a total capacity of {card} GiB of which 0.10 GiB is free. Of the allocated memory {held} GiB is allocated by PyTorch, and 20.00 MiB is reserved by PyTorch but unallocated."


def lead(settings: str, frames: str, tried: str, card: float, held: float) -> Cause:
    text = f"{settings}\nTraceback (most recent call last):\n{frames}\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. "
    return diagnose(text + CARD.format(card=card, held=held)).failures[0].causes[0]


LLAMA = "model_name_or_path: meta-llama/Llama-3.1-8B\nfull fine-tuning with FSDP on 8 GPUs"
SAVE = '  File "trainer.py", line 9, in save_model\n    self.model.state_dict()'


@pytest.mark.parametrize(
    ("card", "certainty"), [(79.1, Certainty.CONSISTENT), (20.0, Certainty.PROVEN)]
)
def test_a_save_is_proven_where_the_whole_copy_is_beyond_the_card(
    card: float, certainty: Certainty
) -> None:
    # 112.00 MiB is a 16-bit MLP matrix of this model in either case; an eighth of weights, gradients and states
    # is 7.5 GiB, a whole copy 15.0 GiB
    cause = lead(LLAMA, SAVE, "112.00 MiB", card, card - 1)
    assert (cause.category, cause.certainty) == ("save_full_state", certainty)


def test_a_gathered_layer_of_the_right_size_is_no_proof() -> None:
    # 416.02 MiB, one layer of Llama-3.1-8B in 16 bit, prints 418.00 MiB
    frames = '  File "_fsdp_param_group.py", line 3, in unshard\n    foreach_all_gather(params)'
    cause = lead(LLAMA, frames, "418.00 MiB", 79.1, 78)
    assert (cause.category, cause.certainty) == ("gather_full_params", Certainty.CONSISTENT)


def test_whole_weights_gathered_on_a_card_that_does_not_hold_them_are() -> None:
    frames = '  File "utils.py", line 3, in summon_full_params\n    yield'
    cause = lead(LLAMA.replace("3.1-8B", "3.1-70B"), frames, "502.00 MiB", 79.1, 78)
    assert (cause.category, cause.certainty) == ("gather_full_params", Certainty.PROVEN)


def test_an_optimizers_temporary_of_the_right_size_is_no_proof() -> None:
    frames = '  File "adamw.py", line 3, in _multi_tensor_adamw\n    exp_avg_sq_sqrt = torch._foreach_sqrt(device_exp_avg_sqs)'
    cause = lead(LLAMA, frames, "112.00 MiB", 79.1, 78)
    assert (cause.category, cause.certainty) == ("optimizer_temp", Certainty.CONSISTENT)


def test_logits_need_the_frame_and_the_size() -> None:
    # 8 x 4096 x 128256 x 4 B prints 15.66 GiB; without a frame it is one reading of the size
    run = "model: meta-llama/Llama-3.1-8B\nper_device_train_batch_size: 8\nmax_length: 4096\nLoRA"
    with_frame = lead(run, "    logits = logits.float()", "15.66 GiB", 79.1, 68)
    without = lead(run, "    x = f(y)", "15.66 GiB", 79.1, 68)
    assert (with_frame.category, with_frame.certainty) == ("logits_vocab", Certainty.PROVEN)
    assert (without.category, without.certainty) == ("logits_vocab", Certainty.CONSISTENT)


def test_two_points_make_a_line_and_no_proof() -> None:
    cause = diagnose("batch 1: 20 GB, batch 2: 30 GB, it does not fit with 8").failures[0].causes[0]
    assert (cause.category, cause.certainty) == ("activations", Certainty.CONSISTENT)


@pytest.mark.parametrize(
    ("before", "after", "certainty"),
    [(70.1, 75.2, Certainty.PROVEN), (75.2, 70.1, Certainty.CONSISTENT)],
)
def test_only_memory_that_came_back_while_profiling_proves_another_process(
    before: float, after: float, certainty: Certainty
) -> None:
    text = f"AssertionError: Error in memory profiling. Initial free memory {before} GiB, current free memory {after} GiB."
    cause = diagnose(text).failures[0].causes[0]
    assert (cause.category, cause.certainty) == ("other_process", certainty)


def test_copies_on_the_host_are_consistent_however_small_the_machine() -> None:
    text = "model: meta-llama/Llama-3.1-70B\nhost_ram_gb: 500\n8 GPUs\nLoading checkpoint shards: 10%\nfailed (exitcode: -9) local_rank: 0"
    cause = diagnose(text).failures[0].causes[0]
    assert (cause.category, cause.certainty) == ("host_full_copy_per_rank", Certainty.CONSISTENT)
    assert "500 GB" in cause.formula


def test_a_crash_of_the_device_explains_the_refusals_behind_it() -> None:
    crash = "Indexing.cu:662: block: [633,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n"
    refusal = (
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`\n"
    )
    full = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 0.10 GiB is free.\n"
    after = diagnose(crash + refusal).failures[0].causes[0]
    assert after.category == "not_memory"
    before = diagnose(refusal + crash).failures[0].causes[0]
    assert before.certainty is Certainty.UNKNOWN
    with_sizes = diagnose(crash + full).failures[0].event
    assert with_sizes is not None
    assert with_sizes.kind == "cuda_oom"
