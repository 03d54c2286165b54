"""A process that has SGLang imported and forks the processes of servers, in place of fresh interpreters.

`start` gives what `subprocess.Popen([python, "-m", module, *flags])` would, without the imports. The forked
process runs the module as `__main__` with its own environment, process group, `sys.path`, `sys.argv` and log.
Before that it forks children that wait: the first `Process.start()`s of multiprocessing, schedulers and
detokenizer, hand them what "spawn" would hand to a new interpreter. They inherit nothing that the launcher did.

As in fresh interpreters: every process loads the plugins and applies their hooks itself; of this package only
the platform's answers are imported before; parents, groups, signals, exit codes; further children are spawned.

Not as in fresh interpreters: modules are imported before the plugins load (SGLang's hooks reach into modules that
imported their target earlier, here into those of SGLang and of plugins alone), and resource limits that the
launcher sets do not reach its children. What a module reads from the environment while it is imported is the
zygote's: each zygote serves one environment but for the variables MAY_DIFFER, and none of those may be read
meanwhile, except to be set again (RETRACTION).
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing.context
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, popen_fork, popen_forkserver, resource_tracker, spawn
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from setproctitle import setproctitle

PRELOAD = ("sglang.srt.entrypoints.http_server", "sglang.srt.managers.detokenizer_manager")  # and all models but
# those that import the model runner, which starts the platform, and those that import every model:
LATER = """clip falcon_h1 falcon_mamba granitemoehybrid jet_nemotron jet_vlm llama_embedding mamba mindspore
nano_nemotron_vl nemotron_h nemotron_h_mtp registry roberta xverse""".split()
MAY_DIFFER = tuple(
    """SGLANG_CUDA_COREDUMP_BEFORE_CRASH SGLANG_PYSPY_DUMP_BEFORE_CRASH DFLASH_ SGLANG_PLUGINS
SGLANG_TEST_RETRACT SGLANG_ENABLE_STRICT_MEM_CHECK SGLANG_CHECK_KV
SGLANG_REQ_RUNNING_TIMEOUT SGLANG_FAILED_SESSION SGLANG_HOST_IP SGLANG_TEST_DISAGG
SGLANG_DISAGGREGATION_BOOTSTRAP SGLANG_DISAGGREGATION_HEARTBEAT
SGLANG_DISAGGREGATION_WAITING SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK
SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION OPENAI_API_KEY MC_FORCE_TCP PYTHONPATH
PYTEST_CURRENT_TEST""".split()
)
RETRACTION = ("TEST_RETRACT", "TEST_RETRACT_INTERVAL", "TEST_RETRACT_NO_PREFILL_BS")  # of the scheduler's module

_zygotes: list[Zygote] = []


def start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Forked:
    """Runs `command`, `[python, "-m", module, *flags]`, with its output in `log`."""
    zygote = next((one for one in _zygotes if one.suits(environment)), None)
    if zygote is None:
        zygote = Zygote(environment)
        _zygotes.append(zygote)
    return Forked(zygote, zygote.ask((command[2:], dict(environment), os.getcwd(), str(log))))


class Zygote:
    """The forking process, seen from the test run. When the test run ends, so does it, with all that it forked."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = _fixed(environment)
        self._output = tempfile.TemporaryFile()
        self._lock = threading.Lock()
        self._pipe, theirs = Pipe()
        with theirs:
            subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), environment.get("PYTHONPATH", "")],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        self._after_import = self._environment | self._answer()

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Whether SGLang's import would see the same; variables that the import itself sets may be there."""
        same = self._environment.items() <= _fixed(environment).items() <= self._after_import.items()
        return same and not self.ended

    @property
    def ended(self) -> bool:
        return self._pipe.closed

    def ask(self, request: Any) -> Any:
        with self._lock:
            try:
                self._pipe.send(request)
                return self._answer()
            except BaseException:  # the next request would get the answer to this one
                self._pipe.close()
                raise

    def _answer(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            self._output.seek(0)
            raise RuntimeError(f"the zygote ended\n{self._output.read().decode(errors='replace')}") from None


class Forked:
    """The part of `subprocess.Popen` that the tests use, for a child of the zygote."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._zygote = zygote

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = -signal.SIGKILL if self._zygote.ended else self._zygote.ask(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or 0)
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.02)
        return code


def _fixed(environment: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if not key.startswith(MAY_DIFFER)}


# What follows runs in the zygote and in the processes that it forks.


def main(pipe: Connection, python_path: str) -> None:
    library = sys.path[1:]
    _search(python_path, library)
    imports_set = _preload()
    pipe.send(imports_set)
    children: set[int] = set()
    while True:
        try:
            request = pipe.recv()
        except EOFError:  # the test run has ended
            break
        if isinstance(request, int):
            pid, status = os.waitpid(request, os.WNOHANG)
            children.discard(pid)
            pipe.send(os.waitstatus_to_exitcode(status) if pid else None)
            continue
        pid = os.fork()
        os.setpgid(pid, pid or os.getpid())  # in both, whichever comes first
        if pid == 0:
            pipe.close()
            _become(request, library, imports_set)
            return
        children.add(pid)
        pipe.send(pid)
    for pid in children:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)


def _search(python_path: str, library: Sequence[str]) -> None:
    """sys.path as `python -m` has it in this directory."""
    sys.path[:] = [os.getcwd(), *(os.path.abspath(entry) for entry in python_path.split(":") if entry), *library]
    importlib.invalidate_caches()


def _preload() -> dict[str, str]:
    """Imports SGLang and returns the environment variables that the import set."""
    before = dict(os.environ)
    read: set[str] = set()
    getitem = os._Environ.__getitem__

    def noting(self: Any, key: str) -> str:
        read.add(key)
        return getitem(self, key)

    os._Environ.__getitem__ = noting
    for name in PRELOAD:
        importlib.import_module(name)
    for path in sorted(Path(sys.modules["sglang.srt.models"].__path__[0]).glob("*.py")):
        if path.stem not in LATER:
            with suppress(ImportError):  # as in SGLang's registry of models
                importlib.import_module(f"sglang.srt.models.{path.stem}")
    os._Environ.__getitem__ = getitem
    import numpy
    from sglang.srt.plugins import HookRegistry

    late = {name for name in read if name.startswith(MAY_DIFFER)} - {f"SGLANG_{name}" for name in RETRACTION}
    assert not late, f"read while SGLang was imported, and different from test to test: {sorted(late)}"
    assert not HookRegistry._patched, "a hook was applied before any process asked for it"
    assert "sglang.srt.model_executor.model_runner" not in sys.modules, "LATER lacks a model"
    assert len(os.listdir("/proc/self/task")) == 1, "a thread, which forked processes would lack"
    _hooks_find_names_at_once()
    os.register_at_fork(after_in_child=numpy.random.seed)  # as `random` does by itself
    setproctitle("zygote")  # the first call has to find the arguments' place before the environment changes
    gc.freeze()
    return dict(os.environ.items() - before.items())


def _hooks_find_names_at_once() -> None:
    """A hook looks for its target among the names of every module, which takes each process a second: here it
    looks in those modules that had imported it when the zygote was ready, and in those that came later."""
    from sglang.srt.plugins import hook_registry

    known = dict(sys.modules)
    holders: dict[int, list[ModuleType]] = {}
    for module in filter(None, known.values()):
        for value in list(getattr(module, "__dict__", {}).values()):
            holders.setdefault(id(value), []).append(module)
    search = hook_registry._propagate_patch

    def search_holders(original: object, *rest: Any) -> int:
        later = [module for name, module in sys.modules.items() if name not in known]
        modules = SimpleNamespace(values=lambda: holders.get(id(original), []) + later)
        hook_registry.sys = SimpleNamespace(modules=modules)
        return search(original, *rest)

    hook_registry._propagate_patch = search_holders


def _become(request: tuple[Any, ...], library: Sequence[str], imports_set: Mapping[str, str]) -> None:
    command, environment, directory, log = request
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    _set_environment({**environment, **imports_set})
    os.chdir(directory)
    _search(os.environ.get("PYTHONPATH", ""), library)
    loaded = sys.modules["dflash_sglang"].__spec__
    found = next(filter(None, (finder.find_spec(loaded.name, None) for finder in sys.meta_path)))
    same = os.path.samefile(found.origin, loaded.origin)
    assert same, f"{found.origin} is to run, and the zygote has imported {loaded.origin}"
    from sglang.srt.environ import envs

    for name in RETRACTION:
        setattr(sys.modules["sglang.srt.managers.scheduler"], name, getattr(envs, f"SGLANG_{name}").get())
    _fork_spares(_spares(command))
    setproctitle(" ".join([sys.executable, "-m", *command]))
    module, *sys.argv[1:] = command
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _set_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _spares(command: Sequence[str]) -> int:
    """The schedulers of all ranks, a detokenizer, and a controller or a second replica's scheduler."""
    ranks = int(command[command.index("--tp-size") + 1]) if "--tp-size" in command else 1
    return ranks + 2


def _fork_spares(count: int) -> None:
    """Forks the children that wait, and has "spawn" use them; returns in the launcher alone."""
    spares: list[tuple[int, socket.socket]] = []
    for _ in range(count):
        channel, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            for other in (channel, *(channel for _, channel in spares)):
                other.close()
            _wait_for_work(theirs)
        theirs.close()
        spares.append((pid, channel))

    def connect(descriptors: Sequence[int]) -> tuple[int, int]:
        """Stands in for a fork server: descriptors go over a socket, work follows on a pipe, a pid comes back."""
        pid, channel = spares.pop(0)
        (parent_r, child_w), (child_r, parent_w) = os.pipe(), os.pipe()
        with channel:
            socket.send_fds(channel, [b"."], [child_r, child_w, resource_tracker.getfd(), *descriptors])
            channel.sendall(pickle.dumps(dict(os.environ)))
        forkserver.write_signed(child_w, pid)
        os.close(child_r)
        os.close(child_w)
        return parent_r, parent_w

    class Popen(popen_forkserver.Popen):
        method = "spawn"
        poll = popen_fork.Popen.poll  # of a child, where a fork server's process is none

    forkserver.connect_to_new_process = connect
    spawned = multiprocessing.context.SpawnProcess._Popen
    multiprocessing.context.SpawnProcess._Popen = staticmethod(
        lambda process: Popen(process) if spares else spawned(process)
    )


def _wait_for_work(channel: socket.socket) -> None:
    """What `multiprocessing.spawn.spawn_main` does in a new interpreter; it does not return either."""
    _, descriptors, *_ = socket.recv_fds(channel, 1, 64)
    if not descriptors:  # the launcher has ended and did not need this process
        os._exit(0)
    child_r, child_w, tracker, *inherited = descriptors
    with channel.makefile("rb") as stream:
        _set_environment(pickle.load(stream))
    channel.close()
    resource_tracker._resource_tracker._fd = tracker
    forkserver._forkserver._inherited_fds = inherited
    raise SystemExit(spawn._main(child_r, os.dup(child_r)))


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), sys.argv[2])
