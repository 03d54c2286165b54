"""Stands in for the transfer engine of mooncake: writes host memory of another process through a socket.

A test puts the folder of this package on PYTHONPATH. A receiver refuses a call that writes outside of the memory
that it has registered: nothing of the call is written, and its log has a line with `UNREGISTERED`.

The file that `FAULT_ENV` names holds the fault of the calls to come, empty without one:

break       a call writes half of its bytes and fails
slow N      a call begins N seconds later
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence

FAULT_ENV = "DFLASH_TEST_TRANSFER_FAULT"
UNREGISTERED = "stand-in for mooncake: memory that is not registered"
_LENGTH = struct.Struct("!Q")
_DONE, _REFUSED = b"\0", b"\1"


class TransferEngine:
    """Addresses and lengths are in bytes. Calls return 0, or -1 where they fail."""

    def __init__(self) -> None:
        self._regions: dict[int, int] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._local = threading.local()  # connections are of one thread each

    def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
        threading.Thread(target=self._accept, daemon=True).start()
        return 0

    def get_rpc_port(self) -> int:
        return int(self._listener.getsockname()[1])

    def batch_register_memory(self, addresses: Sequence[int], lengths: Sequence[int]) -> int:
        self._regions.update(zip(map(int, addresses), map(int, lengths), strict=True))
        return 0

    def batch_unregister_memory(self, addresses: Sequence[int]) -> int:
        for address in addresses:
            del self._regions[int(address)]
        return 0

    def register_memory(self, address: int, length: int) -> int:
        return self.batch_register_memory([address], [length])

    def unregister_memory(self, address: int) -> int:
        return self.batch_unregister_memory([address])

    def send_probe(self, peer: str) -> int:
        return self.batch_transfer_sync_write(peer, [], [], [])

    def transfer_sync_write(self, peer: str, source: int, destination: int, length: int) -> int:
        return self.batch_transfer_sync_write(peer, [source], [destination], [length])

    def batch_transfer_sync_write(
        self, peer: str, sources: Sequence[int], destinations: Sequence[int], lengths: Sequence[int]
    ) -> int:
        """Writes to `peer`, "host:port"; returns once the bytes are in its memory."""
        kind, _, seconds = _fault().partition(" ")
        if kind == "slow":
            time.sleep(float(seconds))
        header = json.dumps([list(map(int, destinations)), list(map(int, lengths))]).encode()
        payload = b"".join(ctypes.string_at(int(at), int(n)) for at, n in zip(sources, lengths, strict=True))
        message = _LENGTH.pack(len(header)) + header + payload
        try:
            connection = self._connection(peer)
            if kind == "break":
                connection.sendall(message[: len(message) - len(payload) // 2])
                self._drop(peer)
                return -1
            connection.sendall(message)
            return 0 if connection.recv(1) == _DONE else -1
        except OSError:
            self._drop(peer)
            return -1

    def _connection(self, peer: str) -> socket.socket:
        kept = self._local.__dict__.setdefault("connections", {})
        if peer not in kept:
            host, _, port = peer.rpartition(":")
            kept[peer] = socket.create_connection((host, int(port)), timeout=30)
        return kept[peer]

    def _drop(self, peer: str) -> None:
        connection = self._local.__dict__.get("connections", {}).pop(peer, None)
        if connection is not None:
            connection.close()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._receive, args=(connection,), daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        stream = connection.makefile("rb")
        with connection, stream:
            while prefix := stream.read(_LENGTH.size):
                destinations, lengths = json.loads(stream.read(_LENGTH.unpack(prefix)[0]))
                wrong = [at for at, n in zip(destinations, lengths, strict=True) if not self._registered(at, n)]
                if wrong:
                    print(f"{UNREGISTERED}: {len(wrong)} of {len(lengths)} blocks", file=sys.stderr, flush=True)
                    stream.read(sum(lengths))
                for at, n in zip(destinations, lengths, strict=True):
                    if not wrong:
                        block = stream.read(n)  # shorter where the sender broke off
                        ctypes.memmove(at, block, len(block))
                connection.sendall(_REFUSED if wrong else _DONE)

    def _registered(self, address: int, length: int) -> bool:
        return any(start <= address and address + length <= start + n for start, n in self._regions.items())


def _fault() -> str:
    path = os.environ.get(FAULT_ENV)
    if path is None or not os.path.exists(path):
        return ""
    with open(path) as file:
        return file.read().strip()
