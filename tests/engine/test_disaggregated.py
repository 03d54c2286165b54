"""Prefill and decode on different servers, float32 on the CPU: output and verify steps are those of one server."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from dflash_sglang.pair import held_out_prompts, pair_directories
from tests.support.disaggregated import serve_apart
from tests.support.engines import greedy_params, serve
from tests.support.transfer.mooncake.engine import FAULT_ENV, UNREGISTERED, TransferEngine

TARGET, DRAFT = (Path(pair_directories()[name]) for name in ("target", "draft"))
NEW_TOKENS = 64


def prompts(count: int = 8) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    return [tokenizer.encode(text) for text in held_out_prompts()[:count]]


def asked(**sampling: Any) -> list[dict[str, Any]]:
    params = greedy_params(NEW_TOKENS, **sampling)
    return [dict(input_ids=prompt, sampling_params=params) for prompt in prompts()]


@pytest.fixture
def engines() -> tuple[TransferEngine, str, TransferEngine]:
    """A sender, the address of a receiver, the receiver."""
    sender, receiver = TransferEngine(), TransferEngine()
    for engine in (sender, receiver):
        engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    return sender, f"127.0.0.1:{receiver.get_rpc_port()}", receiver


@pytest.mark.parametrize(
    ("fault", "status", "arrived"),
    [
        ("", 0, b"abcdefgh"),
        ("fail", -1, bytes(8)),
        ("break", -1, b"abcd" + bytes(4)),
        ("slow 0.01", 0, b"abcdefgh"),
    ],
)
def test_the_stand_in_writes_memory_of_its_receiver(engines, tmp_path, monkeypatch, fault, status, arrived):
    sender, address, receiver = engines
    (tmp_path / "fault").write_text(fault)
    monkeypatch.setenv(FAULT_ENV, str(tmp_path / "fault"))
    source, destination = ctypes.create_string_buffer(b"abcdefgh", 8), ctypes.create_string_buffer(8)
    at, to = ctypes.addressof(source), ctypes.addressof(destination)
    receiver.batch_register_memory([to], [8])
    assert sender.batch_transfer_sync_write(address, [at, at + 4], [to, to + 4], [4, 4]) == status
    deadline = time.monotonic() + 5  # a sender that breaks off does not wait for its receiver
    while destination.raw != arrived and time.monotonic() < deadline:
        time.sleep(0.01)
    assert destination.raw == arrived


def test_the_stand_in_refuses_memory_that_is_not_registered(engines, capfd):
    sender, address, receiver = engines
    source, destination = ctypes.create_string_buffer(b"abcdefgh", 8), ctypes.create_string_buffer(8)
    at, to = ctypes.addressof(source), ctypes.addressof(destination)
    receiver.batch_register_memory([to], [6])
    assert sender.batch_transfer_sync_write(address, [at, at + 4], [to, to + 4], [4, 4]) == -1
    assert destination.raw == bytes(8)
    assert f"{UNREGISTERED}: 1 of 2 blocks" in capfd.readouterr().err
    assert sender.transfer_sync_write(address, at, to, 6) == 0
    assert destination.raw == b"abcdef" + bytes(2)


@pytest.mark.slow
@pytest.mark.full
def test_a_target_without_speculation_decodes_the_same(tmp_path):
    with serve(TARGET) as server, serve_apart(TARGET, None, tmp_path) as apart:
        expected = [server.generate(**request)["output_ids"] for request in asked()]
        assert [answer["output_ids"] for answer in apart.ask_all(asked())] == expected
        assert not apart.wrote_elsewhere()
