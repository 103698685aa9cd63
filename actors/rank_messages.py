"""Lists of integers from the first rank to all others, over plain TCP.

A broadcast of gloo can serve as well, but its sender waits for the receivers, and may wait for ever for
one that has died. Here each follower has a connection of its own: nobody waits to send, either end
notices at once when the other's process ends, and within two minutes when its host is cut off.
"""

from __future__ import annotations

import secrets
import select
import socket
import time
from array import array
from collections.abc import Sequence

TOKEN_LENGTH = 16


class ConnectionLostError(RuntimeError):
    """A rank at the other end of a connection is gone."""


class Announcer:
    """Rank 0's end. Listens on a free port of ``host`` alone until every follower has come with the token."""

    def __init__(self, host: str) -> None:
        self.token = secrets.token_hex(TOKEN_LENGTH)
        self._door = socket.create_server((host, 0))
        self.port: int = self._door.getsockname()[1]
        self._followers: dict[int, socket.socket] = {}
        self._watch = select.poll()

    def accept(self, size: int, timeout_s: float) -> None:
        """Wait for ranks 1 to ``size - 1``; raises :class:`ConnectionLostError` when one does not come."""
        deadline = time.monotonic() + timeout_s
        while len(self._followers) < size - 1:
            try:
                self._door.settimeout(max(0.001, deadline - time.monotonic()))
                line, _ = self._door.accept()
                line.settimeout(max(0.001, deadline - time.monotonic()))
                hello = line.recv(4 * TOKEN_LENGTH, socket.MSG_WAITALL)
            except OSError as error:
                absent = sorted(set(range(1, size)) - set(self._followers))
                raise ConnectionLostError(f"no connection from rank {absent}") from error
            token, _, rank = hello.decode(errors="replace").partition(" ")
            if not secrets.compare_digest(token.encode(), self.token.encode()):
                line.close()  # a stranger
                continue
            _keep_alive(line)
            line.settimeout(timeout_s)
            self._followers[int(rank)] = line
            self._watch.register(line, select.POLLIN)
        self._door.close()

    def send(self, numbers: Sequence[int]) -> None:
        """One message to every follower. Raises :class:`ConnectionLostError` naming the rank that is gone."""
        self.check()
        message = array("q", [len(numbers), *numbers]).tobytes()
        for rank, line in self._followers.items():
            try:
                line.sendall(message)
            except OSError as error:
                raise ConnectionLostError(f"rank {rank} is gone ({error})") from error

    def check(self) -> None:
        """Raise when a follower is gone: they never speak, so what can be read is the end."""
        if self._watch.poll(0):
            gone = [rank for rank, line in self._followers.items() if select.select([line], [], [], 0)[0]]
            raise ConnectionLostError(f"rank {', '.join(map(str, gone))} is gone")

    def close(self) -> None:
        self._door.close()
        for line in self._followers.values():
            line.close()


class Listener:
    """A follower's end."""

    def __init__(self, host: str, port: int, token: str, rank: int, timeout_s: float) -> None:
        try:
            self._line = socket.create_connection((host, port), timeout_s)
            self._line.sendall(f"{token} {rank}".ljust(4 * TOKEN_LENGTH).encode())
        except OSError as error:
            raise ConnectionLostError(f"rank 0 does not answer ({error})") from error
        _keep_alive(self._line)
        self._line.settimeout(None)
        self._stream = self._line.makefile("rb", buffering=1 << 16)

    def receive(self) -> list[int]:
        """The next message; waits without a limit."""
        (count,) = self._read(1)
        return self._read(count).tolist()

    def _read(self, count: int) -> array[int]:
        try:
            data = self._stream.read(8 * count)
        except OSError as error:
            raise ConnectionLostError(f"rank 0 is gone ({error})") from error
        if len(data) < 8 * count:
            raise ConnectionLostError("rank 0 is gone")
        return array("q", data)

    def close(self) -> None:
        self._stream.close()
        self._line.close()


def _keep_alive(line: socket.socket) -> None:
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
