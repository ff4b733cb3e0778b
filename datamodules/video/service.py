"""Decode in a separate process that can be killed: broken files make decoders hang, leak or crash.

`DecodeService` starts a small worker (`decode_worker.py`) with its first request, from whichever process uses it;
loader workers are daemonic and may not use multiprocessing, but may start a program. The worker dies with the process
that started it, also when that is killed. Frames come back as an anonymous memory file, without a copy.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datamodules.errors import MediaError

if TYPE_CHECKING:
    import numpy as np

    from datamodules.types import MediaRef
    from datamodules.video.spec import VideoPlan, VideoSpec

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
LENGTH = struct.Struct("<I")
START_SECONDS = 180.0
"""A worker imports torch; on a busy machine that takes a while."""
MAX_REQUESTS = 500
"""A worker is replaced after so many requests, which bounds what leaking decoders can hold."""


class DecodeService:
    """Callable like `decode_spec`, with a deadline.

    Args:
        timeout_s: seconds for one clip; afterwards the worker is killed and the clip reported.
    """

    def __init__(self, timeout_s: float = 120.0) -> None:
        if timeout_s <= 0:
            raise ValueError(f"decode timeout of {timeout_s} s must be positive")
        self.timeout_s = timeout_s
        self._idle: deque[_Worker] = deque()
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {"timeout_s": self.timeout_s}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def __call__(self, path: Path, ref: MediaRef, spec: VideoSpec) -> tuple[np.ndarray, VideoPlan]:
        """Decode one clip.

        Raises:
            MediaError: the clip cannot be decoded, took too long, or crashed the decoder (twice).
        """
        from datamodules.video.entry import plan_from
        from datamodules.video.frames import share

        request = {"op": "decode", "path": str(path), "start": ref.start, "end": ref.end, "spec": asdict(spec)}
        reply, descriptor = self.request(request, path)
        import numpy as np

        with open(descriptor, "rb") as file:
            # Private mapping: writable for torch, and freed with the array.
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        frames = np.frombuffer(memory, dtype=np.uint8).reshape(reply["shape"])
        return share(frames), plan_from(reply["plan"])

    def request(self, request: dict[str, Any], path: object) -> tuple[dict[str, Any], int]:
        """Send one request to a worker; returns its reply and a file descriptor (-1 when it sent none)."""
        for attempt in (1, 2):
            worker = self._take()
            try:
                reply, descriptor = worker.ask(request, self.timeout_s)
            except TimeoutError:
                worker.kill()
                raise MediaError(path, f"decoding took longer than {self.timeout_s:g} s and was stopped") from None
            except OSError as error:
                code = worker.kill()
                if attempt == 2:
                    raise MediaError(path, f"the decoder process died (exit code {code}, {error})") from None
                continue
            self._give(worker)
            if "error" in reply:
                raise MediaError(path, reply["error"], permanent=reply["permanent"])
            return reply, descriptor
        raise AssertionError("unreachable")

    def close(self) -> None:
        """End the workers."""
        with self._lock:
            while self._idle:
                self._idle.popleft().kill()

    def _take(self) -> _Worker:
        with self._lock:
            if self._pid != os.getpid():
                # Forked: the workers belong to the parent.
                self._idle, self._pid = deque(), os.getpid()
            while self._idle:
                worker = self._idle.popleft()
                if worker.alive():
                    return worker
                worker.kill()
        return _Worker()

    def _give(self, worker: _Worker) -> None:
        if worker.served >= MAX_REQUESTS:
            worker.kill()
            return
        with self._lock:
            self._idle.append(worker)


class _Worker:
    """One decoder process and the socket to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        # No accelerator is needed, and a worker must not hold memory of one.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "datamodules.video.decode_worker", str(theirs.fileno()), str(os.getpid())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
        theirs.close()
        self.socket = ours
        self.served = 0
        self.ready = False

    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, request: dict[str, Any], timeout_s: float) -> tuple[dict[str, Any], int]:
        if not self.ready:
            _receive(self.socket, time.monotonic() + START_SECONDS)
            self.ready = True
        data = json.dumps(request).encode()
        self.socket.settimeout(timeout_s)
        self.socket.sendall(LENGTH.pack(len(data)) + data)
        self.served += 1
        return _receive(self.socket, time.monotonic() + timeout_s)

    def kill(self) -> int | None:
        with contextlib.suppress(OSError):
            self.socket.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        return self.process.wait()


def _receive(connection: socket.socket, deadline: float) -> tuple[dict[str, Any], int]:
    """One length-prefixed JSON message and the descriptor sent with it.

    Raises:
        TimeoutError: nothing complete until the deadline.
        OSError: the other side is gone.
    """
    data, descriptor = b"", -1
    size = LENGTH.size
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        part, descriptors, _, _ = socket.recv_fds(connection, size - len(data), 1)
        if not part:
            raise ConnectionError("connection closed")
        if descriptors:
            descriptor = descriptors[0]
        data += part
        if size == LENGTH.size and len(data) == size:
            size += LENGTH.unpack(data)[0]
    return json.loads(data[LENGTH.size :]), descriptor
