"""Limits of the tests' own, which a busy machine doesn't reach."""

import subprocess
import sys

import patience
import pytest


@pytest.mark.parametrize(("load", "n_waits"), [(0.5, 3), (2, 3), (8, 9)])
def test_a_limit_counts_what_a_process_gets_of_a_core(monkeypatch, load, n_waits):
    clock = []

    def wait(seconds):
        clock.append(seconds)
        raise subprocess.TimeoutExpired("it", seconds)

    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0, 0))
    monkeypatch.setattr("time.monotonic", lambda: sum(clock))
    with pytest.raises(subprocess.TimeoutExpired):
        patience.waited(wait, 2.25)
    assert len(clock) == n_waits


def test_a_command_that_hangs_is_killed_and_another_is_given_its_input():
    with pytest.raises(subprocess.TimeoutExpired):
        patience.run([sys.executable, "-c", "import time; time.sleep(600)"], 0.01)
    repeat = [sys.executable, "-c", "import sys, time; time.sleep(1.2); print(sys.stdin.read())"]
    answer = patience.run(repeat, 60, "words", stdout=subprocess.PIPE, text=True)
    assert (answer.returncode, answer.stdout) == (0, "words\n")
