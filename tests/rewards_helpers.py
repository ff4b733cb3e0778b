"""Task types that only tests use; a module of its own, so that scoring processes import it quickly."""

from __future__ import annotations

import os
from pathlib import Path

from rewards.base import Query, TaskReward, Verdict


class Scripted(TaskReward):
    """Does what the answer says: "mark PATH" (leaves that file), "hang", "die", "grab" (memory), "raise".

    "hang PATH" leaves that file, too, before it hangs; only answers that hang have a short time limit. Anything else is
    compared with the gold answer.
    """

    lane = "process"

    def judge(self, query: Query, answer: str) -> Verdict:
        word, _, value = answer.partition(" ")
        if word in ("mark", "hang") and value:
            Path(value).touch()
        if word == "hang":
            while True:
                pass
        elif word == "die":
            os._exit(3)
        elif word == "grab":
            return Verdict(float(len(bytearray(10 << 30)) > 0))
        elif word == "raise":
            raise RuntimeError("on purpose")
        return Verdict(float(answer == query.ground_truth), parts={"pid": float(os.getpid())})

    def time_limit(self, query: Query) -> float:
        return 1.5 if "hang" in query.response else 60.0
