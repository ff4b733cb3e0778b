"""Task types that only tests use; a module of its own, so that scoring processes import it quickly."""

from __future__ import annotations

import os
import time
from pathlib import Path

from rewards.base import Query, TaskReward, Verdict


class Scripted(TaskReward):
    """Does what the answer says: "sleep X", "hang", "die", "grab" (memory), "raise".

    "hang PATH" leaves that file before it hangs. Anything else is compared with the gold answer.
    """

    lane = "process"

    def judge(self, query: Query, answer: str) -> Verdict:
        word, _, value = answer.partition(" ")
        if word == "sleep":
            time.sleep(float(value))
        elif word == "hang":
            if value:
                Path(value).touch()
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
        return float(query.fields.get("limit", 1.5))
