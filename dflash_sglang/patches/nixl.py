"""A prefill server whose transfers nixl makes: what SGLang sees to for mooncake only."""

from __future__ import annotations

import pkgutil
from typing import Any

from dflash_sglang.patches.agreement import other_buffers
from dflash_sglang.patches.apply import replace
from dflash_sglang.sglang_names.scheduler import disaggregation_prefill, envs

_MANAGERS = "sglang.srt.disaggregation.nixl.conn.NixlKVManager"


def refuse_peers_without_draft() -> None:
    """Requests of decode servers without a draft fail, each with a message.

    SGLang raises where such a server registers. That ends the thread through which every decode server asks.
    """
    managers = pkgutil.resolve_name(_MANAGERS)
    prepare, add = managers._prepare_payload_xfer, managers.add_transfer_request

    def _prepare_payload_xfer(manager: Any, peer: Any) -> None:
        if other_buffers(manager, peer) is None:
            prepare(manager, peer)

    def add_transfer_request(manager: Any, bootstrap_room: int, *chunk: Any, **more: Any) -> None:
        peers = [manager.decode_kv_args_table[name] for name in manager.transfer_infos.get(bootstrap_room, ())]
        reason = next(filter(None, (other_buffers(manager, peer) for peer in peers)), None)
        if reason is None:
            add(manager, bootstrap_room, *chunk, **more)
        else:
            manager.conclude_failure(bootstrap_room=bootstrap_room, failure_reason=reason)

    replace("nixl-peers", managers, _prepare_payload_xfer)
    replace("nixl-requests", managers, add_transfer_request)


def send_what_is_written() -> None:
    """A cached prefix is sent before the forward of the rest only if no earlier forward may still write it.

    Otherwise it is sent with the rest. SGLang gives each early send an event to wait for, which nixl ignores.
    """
    if not envs.SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX.get():
        return
    schedulers = disaggregation_prefill.SchedulerDisaggregationPrefillMixin
    send = schedulers.maybe_send_cached_prefix_chunk

    def maybe_send_cached_prefix_chunk(scheduler: Any, req: Any, allow_send: bool = True) -> None:
        written = not scheduler.enable_overlap or scheduler.forward_stream.query()
        send(scheduler, req, allow_send and written)

    replace("nixl-early-sends", schedulers, maybe_send_cached_prefix_chunk)
