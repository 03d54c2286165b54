"""Prefill and decode on different servers: who may serve whom, and what is kept of retracted requests."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_sglang.checkpoint.files import fingerprint
from tests.support.tiny import make_pair

FILES, OTHERS = "0123456789ab", "ba9876543210"
LINE = dict(layers=5, heads=8, head_dim=128, dtype="bfloat16", features=[1, 9], files=FILES)
BESIDE = " on the prefill server, "


def line(**changes: Any) -> str:
    from dflash_sglang.patches.agreement import draft_line

    return draft_line(**{**LINE, **changes})


def test_two_servers_with_different_drafts_disagree_by_the_fields_that_differ() -> None:
    from dflash_sglang.patches.agreement import disagreement

    # fmt: off
    for theirs, says in (
        (line(), None),
        (line(layers=6), f"layers=6{BESIDE}5 on the decode server: expected the same draft on"),
        (line(heads=4), f"kv=4x128{BESIDE}8x128 on the decode server: "),
        (line(dtype="float8_e4m3fn", files=OTHERS),
         f"dtype=float8_e4m3fn{BESIDE}bfloat16 on the decode server; files={OTHERS}{BESIDE}{FILES} on the decode"),
        (line(features=[1, 8]), f"target_layers=1,8{BESIDE}1,9 on the decode server: "),
        (line().replace("dflash/1", "dflash/2"), f"form=dflash/2{BESIDE}dflash/1 on the decode"),
        ("nhd", f"form=nhd{BESIDE}dflash/1 on the decode server; layers=None on the prefill"),
        (None, "a prefill server without dflash_sglang: expected one that sends context KV"),
    ):
        # fmt: on
        found, any_server = (disagreement(line(), theirs, servers) for servers in ("same", "any"))
        assert found is None if says is None else (found or "").startswith(says), theirs
        assert any_server is None if theirs is None else any_server == found


@pytest.mark.parametrize(
    ("ranks", "alike", "item_lens", "mla", "served"),
    [(1, False, [8, 4], True, True), (2, True, [8, 8], False, True), (2, False, [8, 8], False, False),
     (2, True, [8, 4], False, False), (2, True, [8, 8], True, False)],
)  # fmt: skip
def test_another_number_of_ranks_is_served_where_sglang_slices_target_and_draft_alike(
    monkeypatch: pytest.MonkeyPatch, ranks: int, alike: bool, item_lens: list[int], mla: bool, served: bool
) -> None:
    from dflash_sglang.patches import agreement

    begun, failures, asked, told = list[int](), dict[int, str](), list[tuple[int, ...]](), list[Any]()
    methods = dict(
        init=lambda self, rank: begun.append(rank),
        _get_bootstrap_info_from_server=lambda self, *rank: asked.append(rank) or (rank if rank[2] else None),
        ensure_abort_notified=lambda self: told.extend(self.bootstrap_infos),
    )
    receiver_class = type("CommonKVReceiver", (), methods)
    monkeypatch.setattr(agreement, "CommonKVReceiver", receiver_class)
    agreement.compare_with(line(), "same", alike)
    receiver: Any = receiver_class()
    receiver.bootstrap_addr, receiver.bootstrap_room, receiver.conclude_state = "host:1", 7, None
    info = SimpleNamespace(
        kv_layout=line(), attn_tp_size=ranks, target_cp_ranks=[0], target_tp_ranks=[0, 1], target_pp_ranks=[0]
    )
    receiver.kv_mgr = SimpleNamespace(
        prefill_info_table={"host:1": info},
        attn_tp_size=1,
        is_mla_backend=mla,
        is_hybrid_mla_backend=False,
        kv_args=SimpleNamespace(kv_item_lens=item_lens, state_types=[]),
        record_failure=failures.__setitem__,
        update_status=lambda room, status: None,
    )
    receiver.init(5)
    assert begun == ([5] if served else [])
    # Every rank of the prefill server is told, but for one that has gone.
    assert (asked, told) == (([], []) if served else ([(5, 0, 0, 0), (5, 0, 1, 0)], [(5, 0, 1, 0)]))
    if not served:
        assert receiver.conclude_state == agreement.KVPoll.Failed
        assert failures[7].startswith("DFLASH: host:1: attention TP size 2 on the prefill server, 1 on the decode")


def test_a_prefill_server_tells_its_line_and_refuses_a_target_with_a_layout_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its checksums are signed without the line: SGLang compares none of two signatures."""
    from sglang.srt.disaggregation.common.conn import CommonKVManager

    from dflash_sglang.patches import agreement
    from dflash_sglang.startup.facts import StartupError

    told: list[str] = []
    monkeypatch.setattr(CommonKVManager, "register_to_bootstrap", lambda manager: told.append(manager.kv_layout))
    agreement.register_with(line())
    manager: Any = object.__new__(type("Manager", (CommonKVManager,), {"__abstractmethods__": frozenset()}))
    manager.kv_args = SimpleNamespace(kv_layout=None)
    manager.register_to_bootstrap()
    manager.register_to_bootstrap()
    assert told == [line()] * 2 and manager.kv_args.kv_layout is None
    manager.kv_layout = "packed-v1"
    with pytest.raises(StartupError, match="target's KV layout='packed-v1': expected none"):
        manager.register_to_bootstrap()


def test_requests_of_a_decode_server_with_other_buffers_fail_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """And over nixl it registers: what SGLang raises would end the thread that all decode servers ask."""
    from sglang.srt.disaggregation.common.conn import CommonKVSender
    from sglang.srt.disaggregation.nixl.conn import NixlKVManager

    from dflash_sglang.patches import agreement

    prepared, sent, failures = list[Any](), list[Any](), dict[int, str]()
    monkeypatch.setattr(NixlKVManager, "_prepare_payload_xfer", lambda manager, peer: prepared.append(peer))
    monkeypatch.setattr(
        CommonKVSender, "send", lambda sender, *c, **more: sent.append((sender.bootstrap_room, c, more))
    )
    agreement.refuse_peers_without_draft("mooncake")
    manager = NixlKVManager.__new__(NixlKVManager)
    manager.kv_args = SimpleNamespace(kv_data_ptrs=[1, 2, 3, 4])
    alike, bare = SimpleNamespace(dst_kv_ptrs=[5, 6, 7, 8]), SimpleNamespace(dst_kv_ptrs=[5, 6])
    manager._prepare_payload_xfer(bare)
    agreement.refuse_peers_without_draft("nixl")
    for peer in (alike, bare):
        manager._prepare_payload_xfer(peer)
    assert prepared == [bare, alike]
    manager.decode_kv_args_table = {"alike": alike, "bare": bare}
    manager.transfer_infos = {1: {"alike": None, "dummy": None}, 2: {"alike": None, "bare": None}}
    manager.conclude_failure = lambda bootstrap_room, failure_reason: failures.update(
        {bootstrap_room: failure_reason}
    )
    for room in (1, 2, 3):  # nobody waits for the third any more
        sender = CommonKVSender.__new__(CommonKVSender)
        sender.kv_mgr, sender.bootstrap_room = manager, room
        sender.send("pages", state_indices=None)
    assert sent == [(room, ("pages",), dict(state_indices=None)) for room in (1, 3)]
    assert failures == {
        2: "DFLASH: 2 KV buffers on the decode server, 4 on the prefill server: expected as many. "
        "Serve decode with the same draft."
    }


def test_copies_of_a_checkpoint_have_one_fingerprint_and_other_weights_another(tmp_path: Any) -> None:
    one, again, other = (make_pair(tmp_path / str(seed), seed=seed % 2)[1] for seed in (0, 2, 1))
    (again / "model.safetensors").rename(again / "weights.safetensors")
    assert fingerprint(one) == fingerprint(again) != fingerprint(other)
    config = (one / "config.json").read_text()
    (one / "config.json").write_text(config.replace('"rms_norm_eps": ', '"rms_norm_eps": 1'))
    assert fingerprint(one) != fingerprint(again)


class RunningBatch:
    """Requests of which `left` go on after the step that runs."""

    def __init__(self, left: list[str], done: list[Any]) -> None:
        self.reqs, self._left, self._done = ["a", "b", "c"], left, done

    def filter_batch(self) -> None:
        self.reqs = self._left
        self._done.append("filter")

    def retract_decode(self) -> str:
        self._done.append("retract")
        return "retracted"


@pytest.mark.parametrize("left", [["a", "b"], []])
def test_a_decode_server_takes_the_result_of_the_running_step_before_it_retracts(left: list[str]) -> None:
    from dflash_sglang.patches import retracted_rows

    done = list[Any]()
    batch = RunningBatch(left, done)
    scheduler = SimpleNamespace(
        disaggregation_mode=retracted_rows.DisaggregationMode.DECODE,
        result_queue=deque([("batch", "result")]),
        last_batch="batch",
        process_batch_result=lambda *result: done.append(result),
        new_token_ratio_tracker=SimpleNamespace(current=0.5),
    )
    answer = retracted_rows.update_running_batch(lambda _, batch: batch.retract_decode(), scheduler, batch)
    assert done == [("batch", "result"), "filter", *(["retract"] if left else [])]
    assert not scheduler.result_queue and scheduler.last_batch is None
    assert answer == ("retracted" if left else ([], 0.5, []))
    done.clear()
    assert batch.retract_decode() == "retracted" and done == ["retract"]  # elsewhere as SGLang does
