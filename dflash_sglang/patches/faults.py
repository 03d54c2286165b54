"""A process that dies is named, and the first replica to die ends the server.

SGLang ends a server when a process of the launcher's dies, or when a rank waits longer than --watchdog-timeout. It
does not say which process died where a rank that lost its peer complains sooner. The schedulers of data-parallel
replicas are the controller's processes, and SGLang watches none of them.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

logger = logging.getLogger(__name__)

DYING = 0.5  # seconds: a peer may see a connection break before the process behind it counts as ended
TEARDOWN = 5.0  # seconds that the memory of a process that ends may take
CONTROLLER = "DataParallelController"  # the name of its watchdog


def stop_subprocess_watchdog(original: Callable[..., None], watchdog: Any) -> None:
    """AROUND SubprocessWatchdog.stop: runs in the launcher, before it ends its processes, whatever the reason.

    Logs those that ended by themselves, the first within DYING, and those that are stopped. Not when it is called
    again, as it is by Engine.shutdown at exit: the processes were ended then.
    """
    if watchdog._stop_event.is_set():
        original(watchdog)
        return
    ending = connection.wait([process.sentinel for process in watchdog._processes], timeout=DYING)
    for process, name in zip(watchdog._processes, watchdog._names, strict=True):
        if process.sentinel in ending:
            process.join(TEARDOWN)
        what = fate(process)
        if what is not None:
            logger.error("%s (pid %s) %s.", name, process.pid, what)
    original(watchdog)


def create_watchdog(original: Callable[..., Any], debug_name: str, *args: Any, **kwargs: Any) -> Any:
    """AROUND Watchdog.create: runs in several processes; in the controller of replicas once they are ready.

    With DFLASH, the first replica's scheduler to die ends the server.
    """
    if debug_name == CONTROLLER and _is_dflash():
        titles = {process: _title(process) for process in multiprocessing.active_children()}
        threading.Thread(target=_end_with_the_first, args=(titles,), name="replicas", daemon=True).start()
    return original(debug_name, *args, **kwargs)


def fate(process: BaseProcess) -> str | None:
    """How a child of this process ended, or that it is stopped; None where it runs or ended as it was told to."""
    code = process.exitcode
    if code is None:
        try:
            stopped = psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            return "is gone"
        return "is stopped" if stopped else None
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}" if code else None


def _end_with_the_first(titles: dict[BaseProcess, str]) -> None:
    running = dict(titles)
    while running:
        ending = connection.wait([process.sentinel for process in running])
        for process in [process for process in running if process.sentinel in ending]:
            process.join(TEARDOWN)
            title = running.pop(process)
            what = fate(process)
            if what is not None:
                logger.error("%s (pid %s) %s. The server ends.", title, process.pid, what)
                os.kill(os.getppid(), signal.SIGQUIT)  # to the launcher, as SGLang's schedulers do
                return


def _title(process: BaseProcess) -> str:
    """As the process calls itself, such as sglang::scheduler_TP1; "" where it is gone."""
    try:
        return " ".join(psutil.Process(process.pid).cmdline()).strip()
    except psutil.NoSuchProcess:
        return ""


def _is_dflash() -> bool:
    from sglang.srt.runtime_context import get_spec

    return get_spec().speculative_algorithm == "DFLASH"
