"""A prefill and a decode server have the same draft, or each refuses the other's requests by name.

The prefill server registers with a line on its draft (`draft_line`), in the field in which SGLang has the layout
of KV. SGLang ends a decode server whose own layout differs, so a decode server has none there. It compares the
lines before it asks for a request's KV, and stays up for requests of other prefill servers. It tells the prefill
server to end its part of a refused request.

A decode server without a draft knows of no line: the prefill server refuses its requests.
"""

from __future__ import annotations

import itertools
import pkgutil
from collections.abc import Sequence
from typing import Any

from dflash_sglang.patches.apply import replace
from dflash_sglang.settings.plugin_config import CONFIG_ENV, PrefillServers
from dflash_sglang.sglang_names.scheduler import CommonKVManager, CommonKVReceiver, CommonKVSender, KVPoll
from dflash_sglang.startup.facts import Problem, StartupError

_NIXL = "sglang.srt.disaggregation.nixl.conn.NixlKVManager"  # imports the package nixl
FORM = "dflash/1"  # of the line


def draft_line(layers: int, heads: int, head_dim: int, dtype: str, features: Sequence[int], files: str) -> str:
    """`FORM` and a `key=value` for everything on which both servers must agree.

    heads: KV heads of each layer, on all ranks together; dtype: of the draft's KV pool; features: the target's
    layers that feed the draft; files: a fingerprint of the checkpoint.
    """
    of_target = ",".join(map(str, features))
    return f"{FORM} layers={layers} kv={heads}x{head_dim} dtype={dtype} target_layers={of_target} files={files}"


def register_with(line: str) -> None:
    """A prefill server tells decode servers this line.

    Its start-up ends with a StartupError for a target whose KV has a layout of its own. The line is no part of
    what SGLang's checksums of KV are signed with, so that both servers sign alike.
    """
    register = CommonKVManager.register_to_bootstrap

    def register_to_bootstrap(manager: Any) -> None:
        if manager.kv_layout not in (None, line):
            fix = "Serve prefill and decode by one server, or without speculation."
            expected = "none, as others are not tested"
            raise StartupError([Problem("target's KV layout", manager.kv_layout, expected, fix)])
        manager.kv_layout = line
        register(manager)

    replace("draft-line", CommonKVManager, register_to_bootstrap)


def refuse_peers_without_draft(backend: str) -> None:
    """A prefill server fails requests of decode servers without a draft, each with a message.

    backend: as of --disaggregation-transfer-backend.
    """
    send = CommonKVSender.send

    def send_to_peers_with_draft(sender: Any, *chunk: Any, **more: Any) -> None:
        manager, room = sender.kv_mgr, sender.bootstrap_room
        peers = map(manager.decode_kv_args_table.get, manager.transfer_infos.get(room, ()))
        reason = next(filter(None, (_other_buffers(manager, peer) for peer in peers if peer is not None)), None)
        if reason is None:
            send(sender, *chunk, **more)
        else:
            manager.conclude_failure(bootstrap_room=room, failure_reason=reason)

    replace("draft-peers", CommonKVSender, send_to_peers_with_draft)
    if backend != "nixl":
        return
    managers = pkgutil.resolve_name(_NIXL)
    prepare = managers._prepare_payload_xfer

    def _prepare_payload_xfer(manager: Any, peer: Any) -> None:
        if _other_buffers(manager, peer) is None:
            prepare(manager, peer)

    replace("nixl-peers", managers, _prepare_payload_xfer)


def _other_buffers(manager: Any, peer: Any) -> str | None:
    """Why a prefill server refuses a decode server, None if it does not: the numbers of their KV buffers differ.

    manager: the prefill server's; peer: what the decode server registers."""
    here, there = len(manager.kv_args.kv_data_ptrs), len(peer.dst_kv_ptrs)
    if here == there:
        return None
    return (
        f"DFLASH: {there} KV buffers on the decode server, {here} on the prefill server: expected as many. "
        "Serve decode with the same draft."
    )


def compare_with(line: str, servers: PrefillServers, alike: bool) -> None:
    """A decode server refuses requests of prefill servers that have another line.

    servers: "any" takes those without a line, too. alike: the draft's KV heads are as many, and as large, as the
    target's, so that SGLang slices both alike where the servers have different numbers of ranks.
    """
    init = CommonKVReceiver.init

    def init_where_drafts_agree(receiver: Any, prefill_dp_rank: int) -> None:
        manager, room = receiver.kv_mgr, receiver.bootstrap_room
        info = manager.prefill_info_table.get(receiver.bootstrap_addr)
        if info is None or receiver.conclude_state == KVPoll.Failed:
            init(receiver, prefill_dp_rank)
            return
        found = disagreement(line, info.kv_layout, servers)
        if found is None and info.attn_tp_size != manager.attn_tp_size and not (alike and _sliced(manager)):
            found = (
                f"attention TP size {info.attn_tp_size} on the prefill server, {manager.attn_tp_size} on the "
                "decode server: expected the same. Change --tp-size of one of them."
            )
        if found is None:
            init(receiver, prefill_dp_rank)
            return
        manager.record_failure(room, f"DFLASH: {receiver.bootstrap_addr}: {found}")
        manager.update_status(room, KVPoll.Failed)
        receiver.conclude_state = KVPoll.Failed
        _end_beside(receiver, info, prefill_dp_rank)

    replace("draft-agreement", CommonKVReceiver, init_where_drafts_agree)


def _end_beside(receiver: Any, info: Any, prefill_dp_rank: int) -> None:
    """Tells the ranks of the prefill server that the request has failed, as SGLang tells them of an abort.

    A rank that has not seen the request yet lets it wait for its time-out.
    """
    ranks = itertools.product(info.target_cp_ranks, info.target_tp_ranks, info.target_pp_ranks)
    found = [receiver._get_bootstrap_info_from_server(prefill_dp_rank, *rank) for rank in ranks]
    receiver.bootstrap_infos = [rank for rank in found if rank is not None]
    receiver.ensure_abort_notified()


def disagreement(ours: str, theirs: str | None, servers: PrefillServers) -> str | None:
    """Why a decode server with the line `ours` refuses a prefill server with `theirs`, None if it does not."""
    if theirs is None:
        if servers == "any":
            return None
        return (
            "a prefill server without dflash_sglang: expected one that sends context KV of this server's draft. "
            f'Serve it with the same draft, or set {CONFIG_ENV}=\'{{"prefill": "any"}}\' on this server: fewer '
            "proposals are accepted then."
        )
    if theirs == ours:
        return None
    there, here = _fields(theirs), _fields(ours)
    differences = [
        f"{field}={there.get(field)} on the prefill server, {here.get(field)} on the decode server"
        for field in {**here, **there}
        if there.get(field) != here.get(field)
    ]
    return f"{'; '.join(differences)}: expected the same draft on both. Serve the same draft with the same flags."


def _fields(line: str) -> dict[str, str]:
    form, *fields = line.split(" ")
    return {"form": form, **dict(field.split("=", 1) for field in fields if "=" in field)}


def _sliced(manager: Any) -> bool:
    """Whether SGLang slices all of a page by heads, with one item length."""
    args = manager.kv_args
    plain = not manager.is_mla_backend and not manager.is_hybrid_mla_backend and not args.state_types
    return plain and len(set(args.kv_item_lens)) == 1
