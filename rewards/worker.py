"""Main loop of one scoring process: `python -m rewards.worker PARENT_PID MEMORY_MB`, spoken to by `rewards.pool`."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import resource
import signal
import struct
import sys
from typing import BinaryIO

_HEADER = struct.Struct("!I")
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _read(stream: BinaryIO) -> bytes | None:
    head = stream.read(_HEADER.size)
    if len(head) < _HEADER.size:
        return None
    (size,) = _HEADER.unpack(head)
    data = stream.read(size)
    return data if len(data) == size else None


def _write(stream: BinaryIO, payload: bytes) -> None:
    stream.write(_HEADER.pack(len(payload)) + payload)
    stream.flush()


def _judge(tasks: dict, request: dict) -> dict:
    from rewards.base import Query, Verdict

    query = Query(**{**request["query"], "options": tuple(request["query"]["options"])})
    try:
        verdict = tasks[request["name"]].judge(query, request["answer"])
    except MemoryError:
        verdict = Verdict(0.0, "error", "judging needed more memory than a scoring process may use")
    except Exception as error:  # noqa: BLE001 - untrusted text: what it does to a library becomes this answer's status
        verdict = Verdict(0.0, "error", f"{type(error).__name__}: {error}"[:500])
    return {
        "accuracy": float(verdict.accuracy),
        "status": verdict.status,
        "reason": verdict.reason[:1000],
        "parts": {str(k): float(v) for k, v in verdict.parts.items()},
    }


def main() -> None:
    """Serve requests until the pipe closes."""
    parent, memory_mb = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    # Libraries that print must not corrupt the protocol: replies go through a private copy of standard output.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    init = _read(requests)
    if init is None:
        return
    tasks = pickle.loads(init)  # written by the parent process, never a file
    for task in tasks.values():
        task.warm_up()
    _write(replies, b"ready")
    while (message := _read(requests)) is not None:
        _write(replies, json.dumps(_judge(tasks, json.loads(message))).encode())


if __name__ == "__main__":
    main()
