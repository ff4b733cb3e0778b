"""Habits of the tests themselves: what they assert must not depend on how fast or how busy the machine is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SHORT_S = 60.0
"""What is at least this long may stand for "never ends" or "hangs"."""
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time"}
TIME = re.compile(r"elapsed|seconds|\btook\b|timings|latency")
RATE = re.compile(r"\b(rate|throughput)\b|per_s|speed")


def number(node: ast.AST, below: float = float("inf")) -> bool:
    """Whether the node is a positive number below a limit, in seconds where it is a time."""
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and 0 < node.value < below


def short(node: ast.AST) -> bool:
    """Whether the node is a time of less than a minute."""
    return number(node, SHORT_S)


def called(node: ast.AST) -> str:
    """Name of the function or method that is called, "" for anything else."""
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", None) or getattr(function, "id", "")


def depends_on_speed(sides: list[ast.expr]) -> bool:
    """Whether a comparison holds a measured time against less than a minute, or a rate against any number."""
    text = " ".join(map(ast.unparse, sides))
    clock = any(called(part) in CLOCKS for side in sides for part in ast.walk(side))
    return (any(map(short, sides)) and (clock or bool(TIME.search(text)))) or (
        any(map(number, sides)) and bool(RATE.search(text))
    )


def trees(source: str) -> Iterator[ast.Module]:
    """The module, and the programs that it holds as text."""
    tree = ast.parse(source)
    yield tree
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "sleep(" in node.value:
            try:
                yield ast.parse(node.value)
            except SyntaxError:  # a template or a sentence
                continue


def faults(source: str) -> list[str]:
    """Lines of a test module that depend on the machine's speed."""
    found = []
    for tree in trees(source):
        polling = {
            part
            for loop in ast.walk(tree)
            if isinstance(loop, ast.While) and not isinstance(loop.test, ast.Constant)
            for part in ast.walk(loop)
        }
        for node in ast.walk(tree):
            text = ast.unparse(node) if isinstance(node, (ast.Assert, ast.Call)) else ""
            if isinstance(node, ast.Assert):
                comparisons = [part for part in ast.walk(node.test) if isinstance(part, ast.Compare)]
                if any(depends_on_speed([part.left, *part.comparators]) for part in comparisons):
                    found.append(f"asserts a short time or a rate: {text}")
            elif called(node) == "sleep" and node.args and short(node.args[0]) and node not in polling:
                found.append(f"waits a fixed time instead of for an event: {text}")
            elif any(keyword.arg == "timeout" and short(keyword.value) for keyword in getattr(node, "keywords", ())):
                found.append(f"gives an event less than a minute: {text}")
    return found


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("assert time.monotonic() - began < 5", "asserts"),
        ("assert rate > 5_000", "asserts"),
        ("assert row['speedup'] > 4", "asserts"),
        ("assert row['seconds'] < 3", "asserts"),
        ("assert 2 <= batch.timings['score']", "asserts"),
        ("assert time.process_time() - began < 60", ""),
        ("assert len(rows) == 3", ""),
        ("time.sleep(2)", "waits"),
        ("for _ in range(3):\n    asyncio.sleep(0.1)", "waits"),
        ("while not path.exists():\n    time.sleep(0.1)", ""),
        ("while True:\n    time.sleep(0.1)", "waits"),
        ("time.sleep(3600)", ""),
        ("run('import time; time.sleep(2)')", "waits"),
        ("future.result(timeout=10)", "gives"),
        ("process.wait(timeout=120)", ""),
    ],
)
def test_the_rules(source: str, fault: str) -> None:
    assert [found.split()[0] for found in faults(source)] == [fault] * bool(fault)


# Not this file: it holds the faults as examples.
@pytest.mark.parametrize("path", sorted({*HERE.rglob("*.py")} - {Path(__file__)}), ids=lambda path: path.name)
def test_no_test_depends_on_the_speed_of_the_machine(path: Path) -> None:
    assert faults(path.read_text(encoding="utf-8")) == []
