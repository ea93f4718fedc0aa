"""The fork server: a process with torch imported and nothing else done, of which ranks are forked in milliseconds.

It listens on nothing. The caller holds the other end of a socket pair and sends, a rank at a time, five file
descriptors: standard input, output and error, the rank's connection, and a pipe on which the server writes the rank's
process id and, later, its exit status. When the caller dies the socket closes, the server ends, and the kernel kills
the ranks.
"""

import contextlib
import gc
import os
import select
import signal
import socket
import struct
import sys
from multiprocessing.connection import Connection
from typing import NoReturn

from distwrap._internals.python import stop_finalizers_at_exit
from distwrap._internals.torch import import_compiler
from distwrap.launch.large_pages import use_large_pages
from distwrap.live_objects import mark_as_served

DESCRIPTORS = 5
STATUS = struct.Struct("i")
IDLE_SECONDS = 0.2


def prepare() -> None:
    """Import torch, and all modules of distwrap that a rank may need, so that no rank has to."""
    # torch then asks NVML, and not the driver, whether there is a GPU: a started driver does not survive a fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import distwrap
    from distwrap.group.setup import import_before_group

    import_before_group()
    for name in distwrap.__all__:
        if name != "PipelineStrategy":  # with which torch's compiler comes, and with that most of a first launch's time
            getattr(distwrap, name)
    with contextlib.suppress(ImportError):
        import cloudpickle  # noqa: F401 - with which the function comes, where it is installed


def serve(fd: int) -> NoReturn:
    """Serve until the caller goes, and end this process then."""
    from distwrap.launch import worker

    control = socket.socket(fileno=fd)
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_r, False)
    os.set_blocking(wake_w, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    status_of: dict[int, int] = {}
    settle()
    idle: float | None = IDLE_SECONDS
    while True:
        ready, _, _ = select.select([control.fileno(), wake_r], [], [], None if status_of else idle)
        if not ready:
            idle = None
            import_compiler()  # as DDP and the optimizers do at their first use, now that nobody waits
            settle()
            use_large_pages()
        if wake_r in ready:
            _drain(wake_r)
            _reap(status_of)
            if idle is not None:
                idle = 0.0  # where launches follow each other, the next one waits once, and not each of its ranks
        if control.fileno() in ready:
            request, fds, _, _ = socket.recv_fds(control, 1, DESCRIPTORS)
            if not request:
                os._exit(0)  # an interpreter's own end takes as long as an import, and the ranks would run meanwhile
            stdin, stdout, stderr, conn, status = fds
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                control.close()
                for unneeded in (wake_r, wake_w, status, *status_of.values()):
                    os.close(unneeded)
                for number, given in enumerate((stdin, stdout, stderr)):
                    os.dup2(given, number)
                    os.close(given)
                mark_as_served()
                sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the server's own was /dev/null
                worker.rank_main(Connection(conn))
            for unneeded in (stdin, stdout, stderr, conn):
                os.close(unneeded)
            status_of[pid] = status
            _tell(status, pid)


def settle() -> None:
    """Do once what each rank would otherwise do for the imported modules, which takes tens of milliseconds."""
    gc.collect()
    gc.freeze()  # the collector must not touch, and so copy, the pages that the ranks share
    stop_finalizers_at_exit()  # torch takes its operators apart; a rank's own finalizers still run at its end


def _reap(status_of: dict[int, int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        pipe = status_of.pop(pid, None)
        if pipe is not None:
            _tell(pipe, os.waitstatus_to_exitcode(status))
            os.close(pipe)


def _tell(pipe: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the caller has lost interest in this rank
        os.write(pipe, STATUS.pack(number))


def _drain(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(fd, 4096):
            pass
