"""Reads a model's config.json and safetensors header from the hub; never its weights.

Every way the hub can fail is one clear error: not there, gated, down, slow, offline.
"""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from planner.errors import UnknownNameError, UsageError, VramwiseError
from planner.families import model_spec_from_config
from planner.models.catalogue import catalogue_names
from planner.models.config_file import MAX_CONFIG_BYTES, names_dtype, parse_config
from planner.models.safetensors_header import most_common_dtype
from planner.models.spec import ModelSpec

Answer = TypeVar("Answer")
_OFFLINE_HINT = "fetch it once while online, or give a folder with its config.json"
_TOKEN_HINT = "another token by --token or HF_TOKEN, or none at all for what is public"
_ANSWERS: dict[object, tuple[str, str]] = {
    401: (" (it does not know the token)", _TOKEN_HINT),
    403: (" (the token may not read it)", _TOKEN_HINT),
    429: (
        " (too many requests)",
        "with --token or HF_TOKEN more are allowed; else wait a few minutes, "
        "or give a folder with its config.json",
    ),
}
"""Statuses about which something can be done: what they mean, and what to do."""


def fetch_model(
    repo_id: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    timeout_s: float = 10,
    endpoint: str | None = None,
) -> ModelSpec:
    """Return the model of a hub repository; the whole look-up takes at most about `timeout_s`.

    Raises UnknownNameError (no such repository), UsageError (gated, no config.json, a bad one)
    or VramwiseError (the hub is down, slow or cannot be asked).
    """
    if not timeout_s > 0:
        raise UsageError(f"timeout: {timeout_s} is not allowed", hint="more than 0 seconds")
    from huggingface_hub import constants

    offline = offline or bool(constants.HF_HUB_OFFLINE)

    def fetch() -> ModelSpec:
        config = parse_config(
            _config_file(repo_id, revision, token, offline, timeout_s, endpoint).read_bytes(),
            label=f"{repo_id}/config.json",
        )
        where = f"hub {repo_id}" + (f"@{revision}" if revision else "")
        spec = replace(model_spec_from_config(config, name=repo_id, source=where), hub_id=repo_id)
        if names_dtype(config) or offline:
            return spec
        amounts = _header_amounts(repo_id, revision, token, timeout_s, endpoint)
        return replace(spec, checkpoint_dtype=most_common_dtype(amounts)) if amounts else spec

    return within(timeout_s, repo_id, fetch)


def fetch_file(repo_id: str, name: str, *, timeout_s: float = 10) -> Path:
    """Return a small JSON file of a hub repository, from the cache or downloaded; raises as fetch_model."""
    from huggingface_hub import constants

    offline = bool(constants.HF_HUB_OFFLINE)
    return within(
        timeout_s,
        repo_id,
        lambda: _config_file(repo_id, None, None, offline, timeout_s, None, name=name),
        file=name,
    )


def _config_file(
    repo_id: str,
    revision: str | None,
    token: str | None,
    offline: bool,
    timeout_s: float,
    endpoint: str | None,
    *,
    name: str = "config.json",
) -> Path:
    """Return the cached file, downloading it first unless offline."""
    import huggingface_hub as hub

    if not offline:
        url = hub.hf_hub_url(repo_id, name, revision=revision, endpoint=endpoint)
        facts = hub.get_hf_file_metadata(url, token=token, timeout=timeout_s, endpoint=endpoint)
        if facts.size is not None and facts.size > MAX_CONFIG_BYTES:
            raise UsageError(
                f"{repo_id}/{name}: {facts.size} bytes is too large for a {name}",
                hint=f"at most {MAX_CONFIG_BYTES} bytes are read",
            )
    return Path(
        hub.hf_hub_download(
            repo_id,
            name,
            revision=revision,
            token=token,
            etag_timeout=timeout_s,
            local_files_only=offline,
            endpoint=endpoint,
        )
    )


def _header_amounts(
    repo_id: str, revision: str | None, token: str | None, timeout_s: float, endpoint: str | None
) -> dict[str, int]:
    """Return elements by safetensors dtype, or nothing for a repository without safetensors."""
    import huggingface_hub as hub
    from huggingface_hub import errors

    api = hub.HfApi(endpoint=endpoint, token=token)
    try:
        metadata = api.get_safetensors_metadata(repo_id, revision=revision, timeout=timeout_s)
    except (errors.NotASafetensorsRepoError, errors.SafetensorsParsingError):
        return {}
    return {str(dtype): int(count) for dtype, count in metadata.parameter_count.items()}


def within(
    timeout_s: float, repo_id: str, fetch: Callable[[], Answer], *, file: str = "config.json"
) -> Answer:
    """Return what `fetch` returns; a hub that trickles bytes cannot hold us past the limit."""
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            outcome["answer"] = fetch()
        except BaseException as error:  # handed to the caller below
            outcome["error"] = error

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    # two requests of at most timeout_s each, then whatever still hangs is slow
    thread.join(2 * timeout_s)
    if thread.is_alive():
        raise _slow(repo_id, timeout_s)
    if "error" in outcome:
        raise _explain(outcome["error"], repo_id, timeout_s, file) from None
    answer: Answer = outcome["answer"]
    return answer


def _slow(repo_id: str, timeout_s: float) -> VramwiseError:
    return VramwiseError(
        f"the model hub did not answer for {repo_id!r} within {timeout_s:g} s", hint=_OFFLINE_HINT
    )


def _explain(error: BaseException, repo_id: str, timeout_s: float, file: str) -> BaseException:
    """Return the one clear error for whatever the hub's client raised."""
    from huggingface_hub import errors

    if isinstance(error, VramwiseError):
        return error
    if isinstance(error, errors.GatedRepoError):
        return UsageError(
            f"{repo_id!r} is gated: its config needs an accepted licence and a token",
            hint="accept the licence on the model's page, then pass --token or set HF_TOKEN",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return UsageError(f"{repo_id!r} has no such revision", hint="a branch, tag or commit")
    if isinstance(error, errors.RepositoryNotFoundError):
        return UnknownNameError(
            "model",
            repo_id,
            catalogue_names(),
            hint="the hub has no such repository, or it is private and needs --token",
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        return VramwiseError(
            f"{repo_id!r} is not in the local cache and the hub cannot be asked", hint=_OFFLINE_HINT
        )
    if isinstance(error, errors.EntryNotFoundError):
        return UsageError(
            f"{repo_id!r} has no {file}",
            hint="name a repository of a transformers model"
            if file == "config.json"
            else "name a repository that holds one",
        )
    if isinstance(error, errors.HFValidationError):
        return UsageError(
            f"{repo_id!r} is not a valid hub id", hint="for example Qwen/Qwen2.5-0.5B"
        )
    # the client is httpx or its successor, by the version of huggingface_hub
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "TimeoutException" in kinds:
        return _slow(repo_id, timeout_s)
    if isinstance(error, errors.HfHubHTTPError):
        status = getattr(error.response, "status_code", "an error")
        said, hint = _ANSWERS.get(status, ("", _OFFLINE_HINT))
        return VramwiseError(f"the model hub answered {status}{said} for {repo_id!r}", hint=hint)
    if "HTTPError" in kinds or isinstance(error, OSError | errors.OfflineModeIsEnabled):
        return VramwiseError(
            f"the model hub cannot be reached for {repo_id!r} ({type(error).__name__})",
            hint=_OFFLINE_HINT,
        )
    return error
