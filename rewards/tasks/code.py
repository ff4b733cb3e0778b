"""Code: the program really runs, in the sandbox, against the record's tests or its expected output.

Expected values stay outside the sandbox wherever the test allows it: a program under test cannot read, patch or
print its way to them.
"""

from __future__ import annotations

import ast
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rewards.base import Lane, Query, TaskReward, Verdict, unparsable
from rewards.extract.code import fenced
from rewards.sandbox.run import Limits, Run, run_python

# Runs inside the sandbox. Values leave it as literals of exact built-in types; verdicts of general conditions carry a
# token that was read before the program under test was loaded.
HARNESS = """
import builtins, json, os, sys

def literal(value):
    kind = type(value)
    if value is None or kind in (int, str, bool, bytes, complex):
        return repr(value)
    if kind is float:
        return "1e999" if value == float("inf") else "-1e999" if value == float("-inf") else repr(value)
    if kind is dict:
        return "{" + ", ".join(literal(k) + ": " + literal(v) for k, v in value.items()) + "}"
    if kind in (list, tuple, set, frozenset):
        inner = ", ".join(map(literal, value))
        if kind is list:
            return "[" + inner + "]"
        if kind is tuple:
            return "(" + inner + ("," if len(value) == 1 else "") + ")"
        return "{" + inner + "}" if value else "set()"
    raise TypeError("result of type " + kind.__name__)

def run(steps, token, write, dumps, original):
    space = {"__name__": "solution", "__builtins__": builtins}
    with open("solution.py", encoding="utf-8") as file:
        source = file.read()
    exec(compile(source, "solution.py", "exec"), space)
    for step in steps:
        vars(builtins).update(original)
        try:
            if step["kind"] == "setup":
                exec(compile(step["source"], "tests", "exec"), space)
                continue
            value = eval(compile(step["source"], "tests", "eval"), space)
            reply = literal(value) if step["kind"] == "value" else token if value else ""
            write(dumps({"index": step["index"], "value": reply}) + "\\\\n")
        except Exception as error:  # whatever the program under test raises fails this test only
            write(dumps({"index": step["index"], "error": type(error).__name__ + ": " + str(error)[:200]}) + "\\\\n")

spec = json.loads(sys.stdin.readline())
channel = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
run(spec["steps"], spec["token"], channel.write, json.dumps, dict(vars(builtins)))
channel.flush()
""".replace("\\\\n", "\\n")


@dataclass(frozen=True)
class _Program:
    """One run of the whole program: what it reads and must print."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class _Check:
    """One condition on the program's functions; with `expected` the value is compared outside the sandbox."""

    source: str
    has_expected: bool = False
    expected: Any = None


def read_tests(query: Query) -> tuple[list[_Program], list[str | _Check]]:
    """Tests of a record: programs to run, and checks with their setup code in between.

    `tests` (or `test_cases`, or a gold of that form) may be a list of `{"input": ..., "output": ...}`, a list of
    assert statements, one text of them, or `{"inputs": [...], "outputs": [...], "fn_name": ...}`. Without tests the
    gold is the expected output. Raises ValueError for anything else.
    """
    tests = query.fields.get("tests", query.fields.get("test_cases"))
    if tests is None:
        gold = query.ground_truth
        if isinstance(gold, str):
            if not gold.strip():
                raise ValueError("the record has neither tests nor an expected output")
            parsed = _json(gold) if gold.lstrip()[:1] in "[{" else None
            first = parsed[0] if isinstance(parsed, list) and parsed else parsed
            is_tests = bool(parsed) and isinstance(first, dict)
            if not is_tests and not gold.lstrip().startswith("assert "):
                return [_Program(str(query.fields.get("stdin", "")), gold)], []
            tests = parsed if is_tests else gold
        else:
            tests = gold
    if isinstance(tests, str):
        tests = _json(tests) or tests
    if isinstance(tests, Mapping):
        return _from_columns(tests)
    if isinstance(tests, str):
        return [], _asserts(tests)
    programs: list[_Program] = []
    checks: list[str | _Check] = []
    for test in tests:
        if isinstance(test, str):
            checks += _asserts(test)
        elif isinstance(test, Mapping) and ("output" in test or "stdout" in test):
            given = test.get("input", test.get("stdin", ""))
            programs.append(_Program(_lines(given), _lines(test.get("output", test.get("stdout")))))
        else:
            raise ValueError(f"test {str(test)[:80]!r} is neither an assert nor an input-output pair")
    if not programs and not any(isinstance(check, _Check) for check in checks):
        raise ValueError("the record's tests are empty")
    return programs, checks


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _from_columns(tests: Mapping[str, Any]) -> tuple[list[_Program], list[str | _Check]]:
    inputs, outputs = tests.get("inputs", []), tests.get("outputs", [])
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(
            f"{len(inputs)} inputs and {len(outputs)} outputs are not tests: they must be as many, and at least one"
        )
    name = tests.get("fn_name")
    if not name:
        return [_Program(_lines(i), _lines(o)) for i, o in zip(inputs, outputs, strict=True)], []
    if not str(name).isidentifier():
        raise ValueError(f"fn_name={name!r} is not a function name")
    checks: list[str | _Check] = []
    for arguments, expected in zip(inputs, outputs, strict=True):
        call = f"{name}({', '.join(map(repr, arguments))})"
        checks.append(
            _Check(call, True, expected[0] if isinstance(expected, list) and len(expected) == 1 else expected)
        )
    return [], checks


def _asserts(text: str) -> list[str | _Check]:
    """Statements of a test text; `assert f(...) == literal` keeps the literal out of the sandbox."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"the test {text[:80]!r} is not valid Python: {error}") from error
    steps: list[str | _Check] = []
    for node in tree.body:
        if not isinstance(node, ast.Assert):
            steps.append(ast.unparse(node))
            continue
        condition = node.test
        if isinstance(condition, ast.Compare) and len(condition.ops) == 1 and isinstance(condition.ops[0], ast.Eq):
            try:
                expected = ast.literal_eval(condition.comparators[0])
                steps.append(_Check(ast.unparse(condition.left), True, expected))
                continue
            except ValueError:
                pass
        steps.append(_Check(ast.unparse(condition)))
    return steps


def same_output(printed: str, wanted: str) -> bool:
    """Equality of outputs, white space at line ends and around the text aside."""
    left, right = ([line.rstrip() for line in text.strip().splitlines()] for text in (printed, wanted))
    return left == right


class Code(TaskReward):
    """Share of passed tests, or 1 only when all pass.

    A program that fails, crashes or exits early is judged (accuracy 0). One that runs into a limit or the sandbox has
    status "timeout" or "error" and masks its group, unless `limits_are_wrong`.

    Args:
        aliases: further names of the problem type.
        wall_s: seconds of wall clock per run.
        cpu_s: seconds of processor time per run.
        memory_mb: address space in MiB.
        max_tests: tests beyond this number are not run.
        partial_credit: give the share of passed tests instead of all or nothing.
        limits_are_wrong: judge programs over a limit as wrong instead of masking them.
    """

    lane: ClassVar[Lane] = "process"

    def __init__(
        self,
        aliases: Sequence[str] = (),
        wall_s: float = 4.0,
        cpu_s: int = 4,
        memory_mb: int = 512,
        max_tests: int = 20,
        partial_credit: bool = False,
        limits_are_wrong: bool = False,
    ) -> None:
        super().__init__(aliases)
        if max_tests < 1:
            raise ValueError(f"max_tests={max_tests}: at least one test has to run")
        self.limits = Limits(wall_s=wall_s, cpu_s=cpu_s, memory_mb=memory_mb)
        self.max_tests = max_tests
        self.partial_credit, self.limits_are_wrong = partial_credit, limits_are_wrong

    def time_limit(self, query: Query) -> float:
        """Seconds for all runs of one answer; the first run over its own limit ends the judgement earlier."""
        return 5.0 + self.limits.wall_s * (self.max_tests + 1)

    def warm_up(self) -> None:
        """Find out which isolation works here."""
        run_python({"main.py": ""})

    def judge(self, query: Query, answer: str) -> Verdict:
        """Accuracy in [0, 1]. Raises ValueError for records without usable tests."""
        programs, checks = read_tests(query)
        source = fenced(answer).strip()
        if not source:
            return unparsable("no code in the answer")
        try:
            compile(source, "solution.py", "exec", flags=ast.PyCF_ONLY_AST)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return Verdict(0.0, reason=f"the program is not valid Python: {error}"[:300], parts={"tests_passed": 0.0})
        passed, total = 0, 0
        for program in programs[: self.max_tests]:
            run = run_python({"main.py": source}, program.stdin, self.limits)
            stop = self._stopped(run)
            if stop:
                return stop
            passed += run.outcome == "ok" and same_output(run.stdout, program.stdout)
            total += 1
            if passed < total and not self.partial_credit:
                break
        if checks:
            right, number, stop = self._check(source, checks)
            if stop:
                return stop
            passed, total = passed + right, total + number
        share = passed / total
        return Verdict(share if self.partial_credit else float(share == 1.0), parts={"tests_passed": share})

    def _stopped(self, run: Run) -> Verdict | None:
        """Verdict of a run that ended at a limit; None for one that can be judged."""
        if run.outcome in ("ok", "crash"):
            return None
        if run.outcome == "unavailable":
            return Verdict(0.0, "error", f"code is not run: {run.reason}")
        if self.limits_are_wrong:
            return Verdict(0.0, reason=run.reason)
        return Verdict(0.0, "timeout" if run.outcome == "timeout" else "error", run.reason)

    def _check(self, source: str, checks: Sequence[str | _Check]) -> tuple[int, int, Verdict | None]:
        """Passed and total number of checks, in one run, and the verdict when a limit ended it."""
        steps: list[dict[str, Any]] = []
        wanted: list[_Check] = []
        for step in checks:
            if isinstance(step, str):
                steps.append({"kind": "setup", "source": step, "index": -1})
            elif len(wanted) < self.max_tests:
                steps.append(
                    {"kind": "value" if step.has_expected else "truth", "source": step.source, "index": len(wanted)}
                )
                wanted.append(step)
        token = secrets.token_hex(16)
        files = {"main.py": HARNESS, "solution.py": source}
        run = run_python(files, json.dumps({"steps": steps, "token": token}) + "\n", self.limits)
        stop = self._stopped(run)
        if stop:
            return 0, len(wanted), stop
        replies: dict[int, str] = {}
        for line in run.stdout.splitlines():
            reply = _json(line)
            if isinstance(reply, dict) and isinstance(reply.get("value"), str) and isinstance(reply.get("index"), int):
                replies.setdefault(reply["index"], reply["value"])
        passed = sum(_holds(check, replies.get(index), token) for index, check in enumerate(wanted))
        return passed, len(wanted), None

    def well_formed(self, query: Query, answer: str) -> bool:
        """Code that parses."""
        try:
            return bool(ast.parse(fenced(answer)).body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False


def _holds(check: _Check, reply: str | None, token: str) -> bool:
    if reply is None:
        return False
    if not check.has_expected:
        return secrets.compare_digest(reply.encode(), token.encode())
    try:
        value = ast.literal_eval(reply)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    expected = check.expected
    if isinstance(value, tuple) and isinstance(expected, list):  # JSON has no tuples
        value = list(value)
    return bool(value == expected)
