"""Task types that only tests use; a module of its own, so that scoring processes import it quickly."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

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


VERDICTS = {
    "right": Verdict(1.0),
    "own reward": Verdict(0.6, reward=0.0),
    "own reward, whole": Verdict(0, reward=1),
    "parts": Verdict(0.5, parts={"tiou": 0.25, "2": 3.0}),
    "unparsable": Verdict(0.0, "unparsable", "no number: \ud800", {"n": 1.0}, 0.125),
    "not judged": Verdict(0.0, "not_judged", "no judge"),
    "numpy": Verdict(np.float32(0.5), parts={"miou": np.float64(0.25)}, reward=np.float32(0.75)),
}


class Says(TaskReward):
    """Gives the verdict that the answer names."""

    def judge(self, query: Query, answer: str) -> Verdict:
        return VERDICTS[answer]


class SaysInProcess(Says):
    """The same in the pool."""

    lane = "process"

    def time_limit(self, query: Query) -> float:
        return 120.0


class ShowsFields(SaysInProcess):
    """Its reason is what it was given."""

    def judge(self, query: Query, answer: str) -> Verdict:
        return Verdict(1.0, reason=str(dict(query.fields)))


class Broken(SaysInProcess):
    """Lacks a library."""

    def warm_up(self) -> None:
        raise OSError("no such library")
