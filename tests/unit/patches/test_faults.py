"""What is said of a process that died, and what is not taken for a fault. Servers: `test_parallel.py`."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from sglang.srt.utils.watchdog import SubprocessWatchdog

from dflash_sglang.patches import faults

CONTEXT = multiprocessing.get_context("fork")


@pytest.fixture
def children(monkeypatch):  # which outlives them: threads wait for their ends
    """Two processes that sleep, and two that ended, with codes 0 and 3."""
    started = [
        CONTEXT.Process(target=run, args=args)
        for run, args in ((time.sleep, (60,)), (time.sleep, (60,)), (sys.exit, (0,)), (sys.exit, (3,)))
    ]
    for process in started:
        process.start()
    for process in started[2:]:
        process.join()
    yield started
    for process in started:
        process.kill()
        process.join()


def test_the_fate_of_a_process_is_told_where_it_is_no_orderly_one(children):
    killed, stopped, *_ = children
    assert [faults.fate(process) for process in children] == [None, None, None, "ended with exit code 3"]
    os.kill(killed.pid, signal.SIGKILL)
    os.kill(stopped.pid, signal.SIGSTOP)
    killed.join()
    deadline = time.monotonic() + 10
    while faults.fate(stopped) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [faults.fate(process) for process in children[:2]] == ["was ended by SIGKILL", "is stopped"]


def test_the_launcher_names_who_died_also_while_it_dies_before_it_ends_the_others(children, caplog, monkeypatch):
    stops = []
    watchdog = SubprocessWatchdog(children[:3], ["scheduler_0", "scheduler_1", "detokenizer"])
    faults.stop_subprocess_watchdog(stops.append, watchdog)
    assert stops == [watchdog] and not caplog.records
    watchdog = SubprocessWatchdog(children[:2], ["scheduler_0", "scheduler_1"])
    monkeypatch.setattr(faults, "DYING", 30)  # however busy the machine is
    threading.Timer(0.1, children[1].kill).start()  # its peers complain sooner
    faults.stop_subprocess_watchdog(stops.append, watchdog)
    assert [record.message for record in caplog.records] == [
        f"scheduler_1 (pid {children[1].pid}) was ended by SIGKILL."
    ]


def test_what_the_launcher_ended_itself_is_no_fault_when_it_shuts_down_again(children, caplog):
    watchdog, stops = SubprocessWatchdog(children[:3]), []

    def stop(watchdog):
        stops.append(watchdog)
        SubprocessWatchdog.stop(watchdog)

    faults.stop_subprocess_watchdog(stop, watchdog)
    children[0].kill()
    children[0].join()
    faults.stop_subprocess_watchdog(stop, watchdog)
    assert stops == [watchdog, watchdog] and not caplog.records


@pytest.mark.parametrize("dflash", [True, False])
def test_the_first_replica_to_die_ends_the_server_under_dflash_alone(children, caplog, monkeypatch, dflash):
    sent = []
    monkeypatch.setattr(faults, "_is_dflash", lambda: dflash)
    monkeypatch.setattr(faults.multiprocessing, "active_children", lambda: children[:2])
    process = SimpleNamespace(getppid=os.getppid, kill=lambda pid, how: sent.append((pid, how)))
    monkeypatch.setattr(faults, "os", process)
    with caplog.at_level(logging.ERROR):
        other = faults.create_watchdog(lambda name, timeout: (name, timeout), "DetokenizerManager", 1)
        assert other == ("DetokenizerManager", 1)
        faults.create_watchdog(lambda name: name, "DataParallelController")
        children[1].kill()
        deadline = time.monotonic() + (10 if dflash else 0.3)
        while not sent and time.monotonic() < deadline:
            time.sleep(0.01)
    assert sent == ([(os.getppid(), signal.SIGQUIT)] if dflash else [])
    assert ("was ended by SIGKILL. The server ends." in caplog.text) == dflash
