"""The stand-in for mooncake writes what it is told to where it may, with the faults that a test asks for."""

from __future__ import annotations

import ctypes
import time

import pytest

from tests.support.transfer.mooncake.engine import FAULT_ENV, UNREGISTERED, TransferEngine


@pytest.fixture
def engines() -> tuple[TransferEngine, str, TransferEngine]:
    """A sender, the address of a receiver, the receiver."""
    sender, receiver = TransferEngine(), TransferEngine()
    for engine in (sender, receiver):
        engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    return sender, f"127.0.0.1:{receiver.get_rpc_port()}", receiver


@pytest.mark.parametrize(
    ("fault", "status", "arrived"),
    [("", 0, b"abcdefgh"), ("break", -1, b"abcd" + bytes(4)), ("slow 0.01", 0, b"abcdefgh")],
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
