"""The inside of a worker process, and the messages between it and `datamodules.common.workers`.

A message is text, and a memory file with arrays whose descriptor is passed along: they are never copied through a pipe.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from datamodules.common.processes import die_with_parent
from datamodules.common.wire import Packed, pack, unpack

_HEADER = struct.Struct("<QQ")


def send(connection: socket.socket, packed: Packed) -> None:
    """One message: the length of its text and of its memory, the text, and a descriptor of the memory."""
    message = _HEADER.pack(len(packed.text), packed.num_bytes) + packed.text
    with contextlib.ExitStack() as stack:
        descriptors = []
        if packed.arrays:
            file = stack.enter_context(os.fdopen(os.memfd_create("arrays"), "wb"))
            file.writelines(packed.chunks())
            file.flush()
            descriptors.append(file.fileno())
        sent = socket.send_fds(connection, [message], descriptors)
    connection.sendall(memoryview(message)[sent:])


def receive(connection: socket.socket, deadline: float | None, limit: int | None) -> tuple[bytes, mmap.mmap | None]:
    """The text of one message and its memory.

    Raises:
        TimeoutError: nothing complete until the deadline (monotonic seconds).
        OSError: the other side is gone, or says more than the limit.
    """
    data, wanted, size = bytearray(), _HEADER.size, 0
    descriptors: list[int] = []
    try:
        while len(data) < wanted:
            if deadline is not None:
                connection.settimeout(max(1e-3, deadline - time.monotonic()))
            part, more, _, _ = socket.recv_fds(connection, min(wanted - len(data), 1 << 20), 1)
            descriptors += more
            if not part:
                raise ConnectionError("connection closed")
            data += part
            if wanted == _HEADER.size and len(data) == wanted:
                length, size = _HEADER.unpack(data)
                if limit is not None and (length > limit or size):
                    raise ConnectionError(f"reply of {length + size} bytes")
                wanted += length
        memory = mmap.mmap(descriptors[0], size, access=mmap.ACCESS_COPY) if size and descriptors else None
        return bytes(data[_HEADER.size :]), memory
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def serve() -> None:
    """Main loop of a worker, started as `python -m datamodules.common.worker SOCKET PARENT`."""
    die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the business of the process that started us
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        os.dup2(2, 1)  # what libraries print is not the program's output
    connection = socket.socket(fileno=int(sys.argv[1]))
    memory_bytes, build = unpack(receive(connection, None, None)[0])
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    try:
        function = pickle.loads(build)()  # written by the process that started us
        reply = pack(["ready"])
    except Exception as error:  # noqa: BLE001 - whoever waits must hear why, whatever it is
        function, reply = None, pack(["raised", type(error).__name__, str(error)])
    send(connection, reply)
    while function is not None:
        try:
            text, memory = receive(connection, None, None)
        except ConnectionError:
            return
        send(connection, _answer(function, text, memory))


def _answer(function: Callable[[Any], Any], text: bytes, memory: mmap.mmap | None) -> Packed:
    try:
        return pack(["done", function(unpack(text, memory))])
    except Exception as error:  # noqa: BLE001 - broken media, hostile text: what they provoke is the request's result
        return pack(["raised", type(error).__name__, str(error)])


if __name__ == "__main__":
    serve()
