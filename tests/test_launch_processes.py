"""Children die with their parents, and signals arrive where they should."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest
from conftest import ROOT
from waiting import GENEROUS_S, all_gone, until

from lightning_modules.launch.config import ConfigError
from lightning_modules.launch.processes import INTERRUPTED, Stage, kill_tree, parse_stages


def start(code: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)


SUPERVISOR = """
import sys
from lightning_modules.launch.processes import ChildRun
child = '''
import signal, sys, time
seen = 0
def on_signal(signum, frame):
    global seen
    seen += 1
signal.signal(signal.SIGINT, on_signal)
print("ready", flush=True)
while not seen:
    time.sleep(0.02)
print("asked", flush=True)
time.sleep({linger})
sys.exit(7)
'''
run = ChildRun([sys.executable, "-c", child])
sys.exit(run.wait())
"""


def test_first_signal_is_passed_on_and_the_exit_code_comes_back():
    process = start(SUPERVISOR.replace("{linger}", "0"))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "asked\n"
    assert process.wait(timeout=GENEROUS_S) == 7


def test_second_signal_ends_the_tree_at_once():
    process = start(SUPERVISOR.replace("{linger}", "3600"))
    assert process.stdout.readline() == "ready\n"
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=GENEROUS_S) == INTERRUPTED
    all_gone(children)


def test_children_die_when_the_parent_is_killed():
    process = start(SUPERVISOR.replace("{linger}", "3600"))
    assert process.stdout.readline() == "ready\n"
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 1
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    all_gone(children)


def test_kill_tree_reaches_grandchildren():
    process = start("import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(3600)'])")
    until(lambda: psutil.Process(process.pid).children(), "the grandchild")
    victims = psutil.Process(process.pid).children()
    kill_tree(process.pid)
    process.wait()
    all_gone(victims)


def test_stages_are_checked_before_the_first_one_runs():
    module = "lightning_modules.launch.cli"
    good = parse_stages([{"name": "train", "module": module, "overrides": ["a=1"], "inherit": True}])
    assert good == [Stage("train", module, ("a=1",), True)]
    for missing in ("nowhere", "lightning_modules.nowhere", "nowhere.deeper", "train.py"):
        with pytest.raises(ConfigError, match=f"module {missing} of stage 'x' does not exist"):
            parse_stages([{"name": "x", "module": missing}])
    with pytest.raises(ConfigError, match="is not a stage, whose fields are name, module, overrides, inherit"):
        parse_stages([{"name": "x", "script": "train.py"}])
