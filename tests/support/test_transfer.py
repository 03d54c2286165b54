"""The stand-in for mooncake writes where it may alone: tests ask its log whether a transfer went astray."""

from __future__ import annotations

import ctypes

from tests.support.transfer.mooncake.engine import UNREGISTERED, TransferEngine


def test_the_stand_in_refuses_memory_that_is_not_registered(capfd):
    sender, receiver = TransferEngine(), TransferEngine()
    for engine in (sender, receiver):
        engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    address = f"127.0.0.1:{receiver.get_rpc_port()}"
    source, destination = ctypes.create_string_buffer(b"abcdefgh", 8), ctypes.create_string_buffer(8)
    at, to = ctypes.addressof(source), ctypes.addressof(destination)
    receiver.batch_register_memory([to], [6])
    assert sender.batch_transfer_sync_write(address, [at, at + 4], [to, to + 4], [4, 4]) == -1
    assert destination.raw == bytes(8)
    assert f"{UNREGISTERED}: 1 of 2 blocks" in capfd.readouterr().err
    assert sender.transfer_sync_write(address, at, to, 6) == 0
    assert destination.raw == b"abcdef" + bytes(2)
