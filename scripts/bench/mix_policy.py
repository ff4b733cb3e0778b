"""Leave a cold start with offline trajectories: every paradigm on `experiment=tiny_mix_policy`, curves and one table.

`python scripts/bench/mix_policy.py [--seeds 11 12 13] [--rows grpo mix ...] [--out FOLDER]`. Finished runs of the same
settings are kept. Writes `results.json`, `table.md` and `curves.svg`.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from datamodules.common.files import write_json, write_text
from datamodules.common.places import ROOT

ROWS = {
    "grpo": ("plain GRPO", ["offline=none"]),
    "mix": ("mix, no correction", ["offline=mix"]),
    "threshold": ("mix where the group is below 0.5", ["offline=mix", "offline.group_threshold=0.5"]),
    "clipped": ("mix, clipped ratio", ["offline=mix", "offline/weighting=clipped"]),
    "luffy": ("LUFFY shaping", ["offline=luffy"]),
    "prefix": ("prefix blending", ["offline=prefix"]),
    "replay": ("experience replay", ["offline=replay"]),
    "sft": ("SFT interleaving below 0.5", ["offline=sft_interleave"]),
}
COLOURS = {"grpo": "#888888", "mix": "#1f77b4", "threshold": "#17becf", "clipped": "#bcbd22", "luffy": "#d62728",
           "prefix": "#2ca02c", "replay": "#9467bd", "sft": "#ff7f0e"}  # fmt: skip


def train(script: str, *overrides: str) -> None:
    """Run one stage; its output is shown only when it fails."""
    environment = {**os.environ, "EVR1_STAGE": "bench"}
    command = [sys.executable, str(ROOT / script), "experiment=tiny_mix_policy", *overrides]
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, check=False, capture_output=True)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )


def run(row: str, seed: int, out: Path, extra: list[str]) -> dict:
    """Train one row with one seed (unless it is there with these settings) and read its curve."""
    folder = out / "runs" / f"{row}_seed{seed}"
    common = [f"seed={seed}", f"assets_dir={out}/assets"]
    finished, settings = folder / "finished.json", [*ROWS[row][1], *extra]
    done = json.loads(finished.read_text()) if finished.is_file() else {}
    if done.get("settings") != settings:
        shutil.rmtree(folder, ignore_errors=True)
        train("scripts/build_assets.py", *common)
        started = time.monotonic()
        train("train.py", *common, *settings, f"run_dir={folder}", "resume=never")
        done = {"settings": settings, "seconds": round(time.monotonic() - started, 1)}
        write_json(finished, done)
    with (folder / "metrics.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    curve = {int(line["step"]): float(line["val/accuracy_mean"]) for line in lines if line.get("val/accuracy_mean")}
    online = {int(line["step"]): float(line["online/accuracy"]) for line in lines if line.get("online/accuracy")}
    return {"row": row, "seed": seed, "held_out": curve, "online": online, "seconds": done["seconds"]}


def first_above(curve: dict[int, float], level: float) -> int | None:
    """The first step of a curve at or above `level`."""
    return next((step for step, value in sorted(curve.items()) if value >= level), None)


def table(results: list[dict]) -> str:
    """Markdown: success before and after per seed, the step at which half is right, seconds."""
    lines = ["| run | seed | before | after | best | step with >= 0.5 | seconds |", "|---|---|---|---|---|---|---|"]
    for result in results:
        curve = dict(sorted(result["held_out"].items()))
        values = list(curve.values())
        half = first_above(curve, 0.5)
        lines.append(
            f"| {ROWS[result['row']][0]} | {result['seed']} | {values[0]:.3f} | {values[-1]:.3f} | {max(values):.3f} | "
            f"{'never' if half is None else half} | {result['seconds']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def curves(results: list[dict], width: int = 640, height: int = 320) -> str:
    """An SVG of held-out success over steps, one line per run."""
    last = max(step for result in results for step in result["held_out"])
    left, top, right, bottom = 50, 20, width - 190, height - 40

    def point(step: int, value: float) -> str:
        return f"{left + (right - left) * step / last:.1f},{bottom - (bottom - top) * value:.1f}"

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">']
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        a, b = point(0, tick), point(last, tick)
        parts.append(f'<polyline points="{a} {b}" stroke="#dddddd" fill="none"/>')
        parts.append(f'<text x="10" y="{float(a.split(",")[1]) + 4}" font-size="11">{tick:.2f}</text>')
    parts.append(f'<text x="{left}" y="{height - 12}" font-size="11">RL steps 0 to {last}: held-out success</text>')
    for result in results:
        points = " ".join(point(step, value) for step, value in sorted(result["held_out"].items()))
        parts.append(f'<polyline points="{points}" stroke="{COLOURS[result["row"]]}" stroke-width="2" fill="none"/>')
    for number, row in enumerate(dict.fromkeys(result["row"] for result in results)):
        y = top + 10 + 18 * number
        parts.append(f'<rect x="{right + 12}" y="{y - 8}" width="10" height="10" fill="{COLOURS[row]}"/>')
        parts.append(f'<text x="{right + 27}" y="{y + 1}" font-size="11">{ROWS[row][0].replace("<", "&lt;")}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> int:
    """Run, collect, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13])
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--out", type=Path, default=Path("outputs/mix_policy"))
    parser.add_argument("--set", nargs="*", default=[], help="further overrides of every run")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    results = []
    for row in arguments.rows:
        for seed in arguments.seeds:
            results.append(run(row, seed, out, arguments.set))
            print(f"{row} seed {seed}: {result_line(results[-1])}", flush=True)
    write_json(out / "results.json", results)
    write_text(out / "table.md", table(results))
    write_text(out / "curves.svg", curves(results))
    print(table(results))
    return 0


def result_line(result: dict) -> str:
    """Held-out success at every evaluation."""
    return " ".join(f"{value:.2f}" for _, value in sorted(result["held_out"].items()))


if __name__ == "__main__":
    sys.exit(main())
