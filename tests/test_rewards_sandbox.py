"""Untrusted programs: what they may not do, at both levels of isolation, and how code is judged."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rewards.base import Query
from rewards.sandbox.run import Limits, isolation_level, run_python
from rewards.tasks.code import Code, read_tests, same_output

ROOT = Path(__file__).resolve().parents[1]
LEVELS = ["namespaces", "filters"]
LIMITS = Limits(wall_s=30.0, cpu_s=10)
SHORT = Limits(wall_s=2.0, cpu_s=1)

# program: acceptable outcomes
HOSTILE = {
    "endless loop": ("while True: pass", {"timeout"}),
    "sleep": ("import time; time.sleep(3600)", {"timeout"}),
    "fork bomb": ("import os\nwhile True: os.fork()", {"violation"}),
    "patient fork bomb": (
        "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
        {"timeout"},
    ),
    "ten gigabytes": ("x = bytearray(10 << 30)", {"violation"}),
    "write outside": ("open('/tmp/reward-evil', 'w').write('x')", {"violation"}),
    "overwrite a library": ("import os; open(os.__file__, 'a').write('x')", {"violation"}),
    "fill the disk": ("f = open('a', 'wb')\nwhile True: f.write(b'0' * 10**6)", {"crash", "violation"}),
    "network": ("import socket; socket.create_connection(('1.1.1.1', 80), 1)", {"violation"}),
    "shell": ("import subprocess; subprocess.run(['ls'])", {"violation"}),
    "kill everything": ("import os; os.kill(-1, 9)", {"violation"}),
    "kill the parent": ("import os; os.kill(os.getppid(), 9)", {"violation"}),
    "flood": ("while True: print('x' * 1000)", {"violation"}),
    "read secrets": ("print(open('/etc/shadow').read())", {"crash", "violation"}),
    "crash": ("1 / 0", {"crash"}),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_are_stopped(name: str, level: str) -> None:
    source, outcomes = HOSTILE[name]
    run = run_python({"main.py": source}, limits=SHORT if outcomes == {"timeout"} else LIMITS, level=level)
    if run.outcome == "unavailable":
        pytest.skip(run.reason)
    assert run.outcome in outcomes, run
    assert run.reason
    assert not Path("/tmp/reward-evil").exists()


@pytest.mark.parametrize("level", LEVELS)
def test_ordinary_programs_run(level: str) -> None:
    source = (
        "import json, math, threading, os\n"
        "open('note.txt', 'w').write(input())\n"
        "t = threading.Thread(target=lambda: print(open('note.txt').read(), math.factorial(5))); t.start(); t.join()\n"
        "print(sorted(os.environ))"
    )
    run = run_python({"main.py": source}, stdin="hello\n", limits=LIMITS, level=level)
    if run.outcome == "unavailable":
        pytest.skip(run.reason)
    assert (run.outcome, run.stdout) == ("ok", "hello 120\n['HOME', 'LANG', 'PATH', 'PYTHONHASHSEED']\n")


def test_a_namespace_shows_nothing_of_the_machine() -> None:
    source = "import os; print(os.getpid(), os.getuid(), os.path.exists('/work'), os.listdir('/tmp'))"
    run = run_python({"main.py": source}, level="namespaces")
    if run.outcome == "unavailable":
        pytest.skip(run.reason)
    assert run.stdout == "1 1000 False []\n"


def test_the_writable_folder_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run_python({"main.py": "open('left.txt', 'w').write('x')"}).outcome == "ok"
    assert not list(tmp_path.iterdir())


def test_this_system_offers_isolation() -> None:
    assert isolation_level() in LEVELS


REFUSAL = """
from rewards.base import Query
from rewards.tasks.code import Code
from rewards.sandbox.child import seccomp

seccomp()  # from here on this process may not start others: a system on which no isolation can be set up
print(Code().judge(Query("", "1", "code"), "print(1)"))
"""


def test_without_isolation_nothing_runs_and_the_score_says_why() -> None:
    run = subprocess.run([sys.executable, "-c", REFUSAL], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "accuracy=0.0, status='error'" in run.stdout
    assert "code is not run: this system allows no isolation of programs" in run.stdout


def judge(source: str, gold: str = "", task: Code | None = None, **fields: object):
    return (task or Code(wall_s=30.0, cpu_s=10)).judge(Query("", gold, "code", fields=fields), source)


def passes(source: str, tests: object) -> bool:
    return judge(source, tests=tests).accuracy == 1.0


ADD = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]


def test_function_tests() -> None:
    assert judge("def add(a, b): return a + b", tests=ADD).accuracy == 1.0
    half = judge("def add(a, b): return 3", tests=ADD)
    assert (half.accuracy, half.parts["tests_passed"]) == (0.0, 0.5)
    assert judge("def add(a, b): return 3", task=Code(partial_credit=True), tests=ADD).accuracy == 0.5
    assert judge(
        "def add(a, b): return a + b", tests="import math\nx = math.floor(2.5)\nassert add(x, 1) == 3"
    ).accuracy
    columns = {"inputs": [[2, 3], [4, 5]], "outputs": [6, [20]], "fn_name": "times"}
    assert judge("def times(a, b): return a * b", tests=columns).accuracy == 1.0


def test_whole_programs() -> None:
    pairs = [{"input": "3\n", "output": "6"}, {"input": "5", "output": "10\n"}]
    assert judge("print(int(input()) * 2)", tests=pairs).accuracy == 1.0
    assert judge("print(6)", tests=pairs).accuracy == 0.0
    assert judge("print('hello')", gold="hello").accuracy == 1.0
    assert judge("print('hello')", gold='[{"input": "", "output": "hello"}]').accuracy == 1.0
    assert same_output("a \nb\n\n", "a\nb")
    assert not same_output("a\nb", "a b")


@pytest.mark.parametrize(
    "source",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()",
        "class Int(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Int(0)",
        "import builtins\nbuiltins.repr = lambda x: '3'\ndef add(a, b): return 0",
        'import os\nfor k in (0, 1): os.write(1, b\'{"index": %d, "value": ""}\\n\' % k)\ndef add(a, b): return 0',
        'import json\njson.dumps = lambda *a: \'{"index": 0, "value": "3"}\'\ndef add(a, b): return 0',
        "def add(",
    ],
)
def test_programs_cannot_talk_their_way_through(source: str) -> None:
    verdict = judge(source, tests=ADD)
    assert (verdict.accuracy, verdict.status) == (0.0, "ok")


def test_builtins_are_restored_before_every_condition() -> None:
    source = "import builtins\nbuiltins.abs = lambda x: 0\ndef root(x): return 0"
    assert judge(source, tests=["assert abs(root(4) - 2) < 1e-6"]).accuracy == 0.0
    assert judge("def root(x): return x ** 0.5", tests=["assert abs(root(4) - 2) < 1e-6"]).accuracy == 1.0


def test_limits_mask_or_count_as_wrong() -> None:
    loop = "def add(a, b):\n    while True: pass"
    assert judge(loop, task=Code(wall_s=2.0, cpu_s=1), tests=ADD).status == "timeout"
    counted = judge(loop, task=Code(wall_s=2.0, cpu_s=1, limits_are_wrong=True), tests=ADD)
    assert (counted.accuracy, counted.status) == (0.0, "ok")
    assert judge("x = 'a' * (10 << 30)", tests=ADD).status == "error"


@pytest.mark.parametrize("tests", [[], [3], {"inputs": [1], "outputs": []}, "assert ("])
def test_unusable_tests_are_errors(tests: object) -> None:
    with pytest.raises(ValueError, match=r"test|inputs"):
        read_tests(Query("", "", "code", fields={"tests": tests}))
