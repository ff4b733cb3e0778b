"""The program behind `DecodeService`: reads requests from a socket, answers with frames in a memory file.

Started as `python -m datamodules.video.decode_worker SOCKET_FD PARENT_PID`.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from datamodules.errors import MediaError
from datamodules.video.service import LENGTH

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve requests until the other side closes the socket."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    # Ctrl-C in the terminal reaches the whole group; the trainer decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    import torch

    import datamodules.video.decode  # noqa: F401  imported before the first deadline starts

    torch.set_num_threads(1)
    _send(connection, {"ready": True})
    while True:
        head = _read(connection, LENGTH.size)
        if head is None:
            return
        request = json.loads(_read(connection, LENGTH.unpack(head)[0]) or b"{}")
        try:
            reply, memory = handle(request)
        except MediaError as error:
            reply, memory = {"error": error.reason, "permanent": error.permanent}, -1
        except Exception as error:  # noqa: BLE001  whatever a broken file provokes is reported with the file
            reply, memory = {"error": f"{type(error).__name__}: {error}", "permanent": False}, -1
        _send(connection, reply, memory)
        if memory >= 0:
            os.close(memory)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the starting one ends, however that happens."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # It ended before the call took effect.
        sys.exit(1)


def handle(request: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Answer one request: (reply, memory file descriptor or -1)."""
    from datamodules.video.spec import VideoSpec

    spec = VideoSpec(**request["spec"])
    if request["op"] == "store":
        return _store(request, spec), -1
    from dataclasses import asdict

    from datamodules.video.decode import decode_spec

    frames, plan = decode_spec(Path(request["path"]), spec, request["start"], request["end"])
    memory = os.memfd_create("frames")
    os.ftruncate(memory, frames.nbytes)
    with mmap.mmap(memory, frames.nbytes) as target:
        target.write(frames.data)
    return {"shape": frames.shape, "plan": asdict(plan)}, memory


def _store(request: dict[str, Any], spec: Any) -> dict[str, Any]:
    """Decode straight into a cache folder; only the size travels back."""
    from datamodules.types import MediaRef
    from datamodules.video.cache import VideoCache
    from datamodules.video.decode import decode_spec

    cache = VideoCache(request["folder"], request["media_root"], request["codec"], threads=1)
    ref = MediaRef(**request["ref"])
    frames, plan = decode_spec(cache.source(ref), spec, ref.start, ref.end)
    try:
        cache.put(ref, spec, frames, plan)
    except OSError as error:
        raise MediaError(ref.path, f"cannot be stored in the cache ({error})", permanent=False) from error
    return {"bytes": cache.entry_path(ref, spec).stat().st_size, "tokens": plan.num_tokens}


def _read(connection: socket.socket, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            return None
        data += part
    return data


def _send(connection: socket.socket, reply: dict[str, Any], memory: int = -1) -> None:
    data = json.dumps(reply).encode()
    message = LENGTH.pack(len(data)) + data
    sent = socket.send_fds(connection, [message], [memory] if memory >= 0 else [])
    connection.sendall(message[sent:])


if __name__ == "__main__":
    main()
