"""Requests that would end SGLang's scheduler, or get no answer: refused where they are tokenized."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from dflash_sglang.patches.input_embeds import place_embeddings
from dflash_sglang.requests.errors import RequestError, unexpected
from dflash_sglang.sglang_names.launcher import fake_bootstrap_host, get_disagg, get_exec

HIGHEST_TOP_K = 2**31 - 1  # SGLang keeps it in 32 bits
HIGHEST_BIAS = 1e30  # finite in float32 when it is divided by the lowest temperature, 1e-6
LONGEST_STOP_REGEX = 256  # bytes; SGLang refuses longer ones


def create_tokenized_object(
    original: Callable[..., Any], manager: Any, obj: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND TokenizerManager._create_tokenized_object: runs for every request, before a scheduler has it.

    Raises RequestError, which every endpoint answers with HTTP status 400.
    """
    _check_stop_regex(obj.sampling_params.get("stop_regex"))
    try:
        tokenized = original(manager, obj, *args, **kwargs)
    except TypeError as error:  # endpoints answer a ValueError; to a stream they answer nothing else
        raise RequestError(f"request: expected fields of known names and types, but: {error}.") from error
    deterministic = get_exec().deterministic.enable_deterministic_inference
    place_embeddings(tokenized, manager.model_config.hidden_size, manager.model_config.dtype)
    _check(tokenized, manager.model_config.vocab_size, deterministic)
    return tokenized


def _check_stop_regex(patterns: Any) -> None:
    for pattern in patterns if isinstance(patterns, list) else [patterns]:
        if isinstance(pattern, str) and len(pattern.encode(errors="replace")) <= LONGEST_STOP_REGEX:
            try:
                re.compile(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                expected = f"a regular expression that Python's re can read (it says: {error})"
                raise unexpected("stop_regex", pattern, expected) from error


def _check(request: Any, vocab_size: int, deterministic: bool) -> None:
    """request: a TokenizedGenerateReqInput."""
    sampling = request.sampling_params
    if (role := get_disagg().disaggregation_mode) != "null":
        _check_room(request, role)
    _check_session(request.session_params)
    _check_prompt(request, vocab_size)
    if request.lora_id is not None and request.lora_name is None:
        raise unexpected("lora_id", request.lora_id, "none, since SGLang finds it itself. Give lora_path")
    if stops := sampling.stop_token_ids:
        if sampling.min_new_tokens > 0:
            _check_tokens("stop_token_ids", min(stops), max(stops), vocab_size)
        # No token outside of the vocabulary ever comes, so none of them stops a request. Another request's
        # min_new_tokens would have SGLang look them up.
        sampling.stop_token_ids = {token for token in stops if 0 <= token < vocab_size} or None
    if sampling.top_k > HIGHEST_TOP_K:
        raise unexpected("top_k", sampling.top_k, f"at most {HIGHEST_TOP_K}, or -1 for all tokens")
    for token, bias in (sampling.logit_bias or {}).items():
        if not bias <= HIGHEST_BIAS:
            raise unexpected(f"logit_bias of {token}", bias, f"a number of at most {HIGHEST_BIAS:g}")
    if deterministic and sampling.min_p > 0:
        raise unexpected("min_p", sampling.min_p, "0 on a server with --enable-deterministic-inference")
    if request.return_logprob:
        if request.top_logprobs_num > vocab_size:
            raise unexpected("top_logprobs_num", request.top_logprobs_num, f"at most {vocab_size}, the vocabulary")
        if request.logprob_start_len < -1:
            raise unexpected("logprob_start_len", request.logprob_start_len, "-1 (no prompt logprobs) or more")


def _check_room(request: Any, role: str) -> None:
    """Where a prefill and a decode server meet for the request. role: of this one."""
    if request.sampling_params.n > 1:
        expected = "1 with prefill and decode on different servers, where SGLang gives all answers one room"
        raise unexpected("n", request.sampling_params.n, expected)
    for field in ("bootstrap_host", "bootstrap_port", "bootstrap_room"):
        if isinstance(value := getattr(request, field), list):
            raise unexpected(field, value, "one value, since the request has one prompt")
    host, room = request.bootstrap_host, request.bootstrap_room
    if room is None or host == fake_bootstrap_host():  # refused by SGLang; its own warm-up, without a transfer
        return
    if role == "decode" and host is None:
        raise unexpected("bootstrap_host", None, "the prefill server of a bootstrap_room, as a router sends it")
    if room < 1:  # 0 stands for a transfer that has not come
        raise unexpected("bootstrap_room", room, "a number of 1 or more, another one for each request")


def _check_session(params: Any) -> None:
    for name, kind, expected in (("id", str, "a string"), ("rid", str, "a string"), ("offset", int, "an integer")):
        if not isinstance(value := getattr(params, name, None), kind | None):
            raise unexpected(f"session_params {name}", value, f"{expected}, or none")


def _check_prompt(request: Any, vocab_size: int) -> None:
    if request.mm_inputs is not None:
        return  # placeholders, whose embeddings are not looked up
    if request.input_ids:
        ids = np.frombuffer(request.input_ids, np.int64)
        _check_tokens("input_ids", int(ids.min()), int(ids.max()), vocab_size)
    elif request.session_params is None:  # a session may have the prompt, and SGLang refuses it without
        raise unexpected("input_ids", [], "a prompt of one token at least")


def _check_tokens(field: str, lowest: int, highest: int, vocab_size: int) -> None:
    """They become indices of the device's tensors, where one outside ends the process."""
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise unexpected(field, wrong, f"tokens of the vocabulary, 0 to {vocab_size - 1}")
