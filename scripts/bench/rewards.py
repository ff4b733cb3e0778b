"""Throughput of scoring: `python scripts/bench/rewards.py [--answers 2048] [--workers 2]`.

Prints answers per second of every simple type on one core, and the time of one mixed batch (half math, the rest every
other type, code included) once the pool is warm.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rewards.router import RewardRouter

OPTIONS = ["A. a red car", "B. a blue bicycle", "C. a green bus", "D. a yellow train"]
TUBE = {"time": [2, 5], "boxes": {str(k): [10, 10, 60, 60] for k in range(2, 6)}}
HTML = "<html><body><h1>Title</h1><ul><li>one</li><li>two</li></ul><p>text</p></body></html>"
SVG = '<svg width="64" height="64"><rect x="8" y="8" width="20" height="20" fill="red"/></svg>'
PROGRAM = "```python\ndef add(a, b):\n    return a + b\n```"


def simple_cases() -> dict[str, list[dict]]:
    """Ten different answers of every type that runs inline."""
    words = ["the man picks up a cup and drinks", "a dog runs over the grass", "someone opens the door slowly"]
    cases: dict[str, list[dict]] = {}

    def add(kind: str, response: str, gold: object, **fields: object) -> None:
        cases.setdefault(kind, []).append({"response": response, "ground_truth": gold, "problem_type": kind, **fields})

    for k in range(10):
        letter = "ABCD"[k % 4]
        add("multiple choice", f"<think>maybe {letter}</think><answer>{letter}</answer>", "B", options=OPTIONS)
        add("multiple choice", f"The {k}th frame shows it, so the answer is ({letter}).", "B", options=OPTIONS)
        add("numerical", f"<answer>{k}.5 meters</answer>", "3.5")
        add("regression", f"The distance is about {k + 1} m", "4")
        add("boolean", "Yes, it does." if k % 2 else "<answer>no</answer>", "yes")
        add("temporal grounding", f'<answer>{{"time": [{k}, {k + 5}]}}</answer>', "[3, 8]")
        add("temporal grounding", f"The event happens from {k} to {k + 4} seconds.", "[3, 8]")
        add("spatial grounding", f"<answer>[{k}, 10, 60, 60]</answer>", "[5, 10, 60, 60]")
        add("spatial-temporal grounding", f"<answer>{json.dumps(TUBE)}</answer>", TUBE)
        add("OCR", f"<answer>gate {k} closes at noon</answer>", "gate 7 closes at noon")
        add("open-ended", f"<answer>{words[k % 3]}</answer>", words[0])
    return cases


def math_case(rng: random.Random) -> dict:
    """One math answer: half plain numbers, half symbolic, a quarter of them wrong."""
    a, b = rng.randint(1, 99), rng.randint(2, 99)
    kind = rng.randrange(4)
    if kind == 0:
        gold, said = str(a), f"\\boxed{{{a}}}"
    elif kind == 1:
        gold, said = f"\\frac{{{a}}}{{{b}}}", f"So $x = \\frac{{{2 * a}}}{{{2 * b}}}$. The answer is {a}/{b}."
    elif kind == 2:
        gold, said = f"{a}\\sqrt{{{b}}}", f"\\boxed{{\\sqrt{{{a * a * b}}}}}"
    else:
        gold, said = f"x^2+{a}x+{b}", f"\\boxed{{{b}+{a}x+x^2}}"
    return {"response": said if rng.random() < 0.75 else "\\boxed{17}", "ground_truth": gold, "problem_type": "math"}


def mixed(number: int, seed: int = 0) -> list[dict]:
    """`number` answers: half math, 1 in 64 each of code, HTML and SVG, simple types for the rest."""
    rng = random.Random(seed)
    simple = [case for cases in simple_cases().values() for case in cases]
    records = []
    for k in range(number):
        if k % 2 == 0:
            records.append(math_case(rng))
        elif k % 64 == 1:
            tests = [f"assert add({k}, 2) == {k + 2}"]
            records.append({"response": PROGRAM, "ground_truth": "", "problem_type": "code", "tests": tests})
        elif k % 64 == 3:
            records.append({"response": HTML.replace("one", str(k)), "ground_truth": HTML, "problem_type": "html"})
        elif k % 64 == 5:
            answer = SVG.replace('x="8"', f'x="{k % 30}"')
            records.append({"response": answer, "ground_truth": SVG, "problem_type": "svg"})
        else:
            records.append(rng.choice(simple))
    return records


def time_mixed(router: RewardRouter, number: int) -> tuple[float, dict[str, int]]:
    """Seconds for one mixed batch on a warm pool, and how often every status came out."""
    for future in [router.submit(**record) for record in mixed(64, seed=1)]:
        future.result()
    started = time.perf_counter()
    scores = [future.result() for future in [router.submit(**record) for record in mixed(number)]]
    seconds = time.perf_counter() - started
    status: dict[str, int] = {}
    for score in scores:
        status[score.status] = status.get(score.status, 0) + 1
    return seconds, status


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=2048, help="size of the mixed batch")
    parser.add_argument("--workers", type=int, default=2, help="scoring processes")
    args = parser.parse_args()
    with RewardRouter(workers=args.workers) as router:
        for kind, cases in simple_cases().items():
            rounds, started = 3000 // len(cases), time.process_time()
            for _ in range(rounds):
                for case in cases:
                    router.score(**case)
            rate = rounds * len(cases) / (time.process_time() - started)
            print(f"{kind:28s} {rate:10.0f} answers per second and core")
        seconds, status = time_mixed(router, args.answers)
        print(f"{args.answers} mixed answers, {args.workers} workers: {seconds:.2f} s, {status}")


if __name__ == "__main__":
    main()
