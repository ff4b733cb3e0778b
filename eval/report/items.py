"""The items of a run as the report's browser shows them."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.run.records import read_records

RIGHT = 0.5
"""An item counts as right in the browser from this accuracy on."""
MAX_TEXT = 4000


def browser_items(folder: str | Path, limit: int) -> list[dict[str, Any]]:
    """Up to `limit` items of a run folder: failed and wrong ones first, each group in the files' order."""
    folder = Path(folder)
    answers, scores = read_records(folder / "answers.jsonl"), read_records(folder / "scores.jsonl")
    found = []
    for uid, item in read_records(folder / "items.jsonl").items():
        found.append(_entry(item, answers.get(uid, {}), scores.get(uid, {})))
    order = {"failed": 0, "unparsed": 1, "wrong": 2, "not_judged": 3, "right": 4}
    chosen = sorted(found, key=lambda entry: order[entry["kind"]])[:limit]
    for entry in chosen:
        path = folder / "frames" / entry.pop("thumbnail")
        data = base64.b64encode(path.read_bytes()).decode() if path.is_file() else ""
        entry["picture"] = data and f"data:image/jpeg;base64,{data}"
    return chosen


def _entry(item: Mapping[str, Any], answer: Mapping[str, Any], score: Mapping[str, Any]) -> dict[str, Any]:
    sample = item["sample"]
    verdicts = [score.get(mode) for mode in ("official", "robust")]
    official, robust = (float(verdict["accuracy"]) if verdict else None for verdict in verdicts)
    state = score.get("state", "failed")
    shown = robust if official is None else official
    kind = state if state != "ok" else "right" if (shown or 0.0) >= RIGHT else "wrong"
    media = [ref["path"] for ref in (*sample["videos"], *sample["images"])]
    return {
        "uid": item["uid"],
        "kind": kind,
        "prompt": shortened(answer.get("prompt") or sample["problem"]),
        "gold": shortened(str(sample["answer"])),
        "answer": shortened(str(answer.get("response", ""))),
        "official": official,
        "robust": robust,
        "reason": score.get("reason") or answer.get("reason") or ("" if answer else "not asked"),
        "media": [Path(path).name for path in media],
        "frames": answer.get("frames", 0),
        "prompt_tokens": answer.get("prompt_tokens", 0),
        "num_tokens": answer.get("num_tokens", 0),
        "seconds": answer.get("seconds", 0.0),
        "thumbnail": answer.get("thumbnail", ""),
    }


def shortened(text: str) -> str:
    """At most about `MAX_TEXT` characters, from both ends: the question and the final answer stand at the end."""
    half, left_out = MAX_TEXT // 2, len(text) - MAX_TEXT
    return text if left_out <= 0 else f"{text[:half]}\n[{left_out} characters are not shown]\n{text[-half:]}"
