"""Launches and features that this package's worker takes no part in: the setting, its value when off, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_sglang.startup.facts import Problem

COORDINATION = "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION"


@dataclass(frozen=True)
class Unserved:
    """A setting of a launch that has to have one value with DFLASH."""

    field: str  # of the server arguments, or an environment variable
    off: object  # the one value
    why: str
    fix: str = ""
    instead: str = ""  # what to set, where that value is not it
    flag: str = ""  # as the operator writes the field, where it is not the field's name
    read: Callable[[Any], object] | None = None  # of the server arguments, where it is not the field as it is

    def value(self, cfg: Any) -> object:
        """cfg: the server arguments."""
        return getattr(cfg, self.field) if self.read is None else self.read(cfg)

    @property
    def setting(self) -> str:
        """As the operator writes the field."""
        return self.flag or f"--{self.field.replace('_', '-')}"

    def problem(self, value: object) -> Problem:
        wanted = self.instead or ("unset" if self.off in (None, False) else repr(self.off))
        fix = self.fix or f"Remove {self.setting}, or serve without speculation."
        return Problem(self.setting, value, f"{wanted} with DFLASH: {self.why}", fix)


def _coordinates(cfg: Any) -> bool:
    from dflash_sglang.sglang_names.launcher import envs  # imported here: the names are checked by now

    # Data-parallel attention alone reads it.
    return cfg.attn_dp_size > 1 and envs.SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION.get()


_WHOLE_ROWS = "the target's features and the slots of all tokens are on every rank"
_REPLAYED = "this package commits recurrent states by itself"
METRIC_LABELS = frozenset({"form", "position", "reason", "state", "width"})
_EXACT = "its output is exactly the target's"
_ONE_ROW = "context KV is written into pools with one row per slot and layer"
_TARGETS_KV = "it restores the target's keys and values, and none of the draft's"
_HICACHE = "Remove {}; --enable-hierarchical-cache keeps both."
_BUILT_IN = "or set SGLANG_PLUGINS=none: SGLang's built-in worker serves it with a draft in z-lab's format"
_NO_PLUGINS = "SGLang's Ray actors load no plugins, and would run its built-in worker"
_TOGETHER = "data-parallel ranks prefill together, or decode together"
_READABLE = f"Serve the draft with a config.json that can be read, {_BUILT_IN}."
_TOKEN_BY_TOKEN = f"Remove --speculative-use-block-verification, {_BUILT_IN}."

UNSERVED = (
    Unserved("pp_size", 1, "one rank has all of the target's layers", "Remove --pp-size; use --tp-size instead."),
    Unserved("attn_cp_size", 1, _WHOLE_ROWS),
    Unserved("enable_prefill_cp", False, _WHOLE_ROWS),
    Unserved("dcp_size", 1, _WHOLE_ROWS),
    Unserved("enable_attn_tp_input_scattered", False, _WHOLE_ROWS),
    Unserved("enable_two_batch_overlap", False, "SGLang splits the verify of a tree, not of a block"),
    Unserved("enable_pdmux", False, "its loop runs the target without the draft"),
    Unserved("decoupled_spec_role", "null", "draft and verify run in one engine"),
    Unserved("elastic_ep_backend", None, "ranks that leave or join do not do so in its draft"),
    Unserved("use_ray", False, _NO_PLUGINS, f"Remove --use-ray, {_BUILT_IN}."),
    Unserved("dwdp_size", 1, "SGLang has no speculative decoding with it"),
    Unserved(COORDINATION, False, _TOGETHER, flag=COORDINATION, read=_coordinates),
    Unserved("decrypted_draft_config_file", None, "it reads the config.json of the draft's checkpoint", _READABLE),
    Unserved(
        "grammar_backend",
        None,
        "outlines cannot take back the proposals that it has looked at",
        fix="Set --grammar-backend xgrammar.",
        instead="xgrammar or llguidance",
        read=lambda cfg: cfg.grammar_backend if cfg.grammar_backend == "outlines" else None,
    ),
    Unserved("enable_unified_memory", False, _ONE_ROW),
    Unserved("enable_page_major_kv_layout", False, _ONE_ROW),
    Unserved("enable_kv_cache_sharding", False, _ONE_ROW),
    Unserved("enable_hisparse", False, "SGLang stages and commits the blocks of EAGLE alone"),
    Unserved("enable_lmcache", False, _TARGETS_KV, _HICACHE.format("--enable-lmcache")),
    Unserved("enable_flexkv", False, _TARGETS_KV, _HICACHE.format("--enable-flexkv")),
    Unserved("kv_canary", "none", "its start-up captures and rehearses after the canary is armed"),
    Unserved("weight_cache_mode", "off", "SGLang's weight cache holds no draft"),
    # Launches that decode nothing, or without a draft.
    Unserved("encoder_only", False, "the server encodes images for others and generates no tokens"),
    Unserved("dllm_algorithm", None, "a diffusion model writes its own blocks, and no draft runs"),
    Unserved("prefill_only_disable_kv_cache", False, "a decode step reads the keys and values that it drops"),
    Unserved("debug_tensor_dump_input_file", None, "the server ends after one prefill"),
    Unserved("enable_return_aux_hidden_states", False, "it captures the target's layers, and no draft runs"),
    # Features that would silently do something else under speculation.
    Unserved(
        "return_hidden_states_mode",
        None,
        "the hidden states of a verify go to the draft",
        flag="--enable-return-hidden-states",
        # SGLang sets it for the capture above.
        read=lambda cfg: None if cfg.enable_return_aux_hidden_states else cfg.return_hidden_states_mode,
    ),
    Unserved("speculative_accept_threshold_single", 1.0, _EXACT),
    Unserved("speculative_accept_threshold_acc", 1.0, _EXACT),
    Unserved("speculative_use_block_verification", False, "it accepts token by token", _TOKEN_BY_TOKEN),
    Unserved("enable_mis", False, "SGLang scores several items at once without speculation alone"),
    Unserved("enable_watermark", False, "it does not watermark"),
    Unserved("enable_linear_replayssm", False, _REPLAYED),
    Unserved("enable_linear_replayssm_spec", False, _REPLAYED),
)

_APART = "with --disaggregation-mode it is not tested"
# Beside UNSERVED, of prefill and decode servers.
UNSERVED_APART = (
    Unserved("disaggregation_decode_enable_offload_kvcache", False, _TARGETS_KV),
    Unserved("disaggregation_decode_allocation_policy", "early", _APART),
    Unserved("disaggregation_decode_host_receive_threshold", 1.0, _APART),
    Unserved("enable_streaming_session", False, _APART),
    Unserved("enable_return_routed_experts", False, _APART),
    Unserved("enable_return_indexer_topk", False, _APART),
)
TRANSFER_BACKENDS = ("mooncake", "mooncake_tcp", "nixl", "fake")


def launch_problems(cfg: Any) -> Iterator[Problem]:
    """What of a launch no draft could be served with. cfg: the server arguments."""
    yield from unserved_problems(UNSERVED, cfg)
    if cfg.disaggregation_mode != "null":
        yield from unserved_problems(UNSERVED_APART, cfg)
        yield from _transfer_problems(cfg.disaggregation_transfer_backend)
    yield from label_problems(cfg.extra_metric_labels)


def unserved_problems(rows: Iterable[Unserved], cfg: Any) -> Iterator[Problem]:
    """Of the rows whose setting has another value. cfg: the server arguments."""
    for row in rows:
        if (value := row.value(cfg)) != row.off:
            yield row.problem(value)


def _transfer_problems(backend: str) -> Iterator[Problem]:
    if backend not in TRANSFER_BACKENDS:
        others = ", ".join(TRANSFER_BACKENDS)
        flag = "--disaggregation-transfer-backend"
        yield Problem(flag, backend, f"one of {others} with DFLASH", f"Set {flag} to one of these, {_BUILT_IN}.")


def label_problems(extra: Mapping[str, str] | None) -> Iterator[Problem]:
    """extra: labels of every series, by --extra-metric-labels. A series has a label once."""
    taken = sorted(METRIC_LABELS & set(extra or ()))
    if taken:
        fix = "Rename them in --extra-metric-labels."
        yield Problem("--extra-metric-labels", taken, "other names than those of the series' own labels", fix)


def reported_rows_problems(
    settings: Any, attn_dp_size: int, chunk: int | None, requests: int, block: int
) -> Iterator[Problem]:
    """SGLang keeps what layers chose in as many rows as it prefills at once, or has requests; a verify has `block`
    rows of each. With data-parallel attention it looks for a rank's choices as if each request had one row.
    settings: the server arguments."""
    if settings.enable_return_routed_experts and attn_dp_size > 1:
        expected = (
            "unset with DFLASH and data-parallel attention: SGLang reports experts of other ranks' tokens then"
        )
        fix = "Remove it, or serve with data-parallel replicas (--dp-size only)."
        yield Problem("--enable-return-routed-experts", True, expected, fix)
    rows = requests * block
    for flag, given in (
        ("--enable-return-routed-experts", settings.enable_return_routed_experts),
        ("--enable-return-indexer-topk", settings.enable_return_indexer_topk),
    ):
        if given and rows > max(chunk or 0, requests):
            expected = f"at least {rows} with {flag}: the rows of {requests} requests in blocks of {block}"
            fix = f"Set --chunked-prefill-size {rows}, or lower --max-running-requests."
            yield Problem("--chunked-prefill-size", chunk, expected, fix)
