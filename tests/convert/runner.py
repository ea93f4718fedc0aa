"""Run scripts on ranks that a warm process forks: each in a fresh process, as a launcher would start it.

The process reads a job a line from standard input, as JSON: the script, the environment of each rank, and a limit in
seconds. It answers with a line: of each rank the exit code, and what it printed.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distwrap._internals.torch import import_compiler
from distwrap.launch import server
from distwrap.live_objects import mark_as_served
from tests.ports import free_port

ROOT = Path(__file__).parents[2]


def torchrun_variables(ranks: int) -> list[dict[str, str]]:
    """Return the variables by which torchrun tells each rank its place."""
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port()), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "case"}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


class Runner:
    """Handle on the warm process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.convert.runner"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def run(
        self,
        script: Path,
        ranks: list[dict[str, str]],
        limit: float = 60,
        *,
        arguments: Sequence[str] = (),
        folder: Path | None = None,
    ) -> list[tuple[int, str]]:
        """Run a script on some ranks, and return the exit code and the output of each.

        Args:
            script: to be run.
            ranks: the environment of each.
            limit: in seconds, after which the ranks are killed.
            arguments: of the script's command line.
            folder: in which it runs; by default the script's own.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"script": str(script), "ranks": ranks, "limit": limit}
        job |= {"arguments": list(arguments), "folder": str(folder or script.parent)}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return [(code, text) for code, text in json.loads(self._process.stdout.readline())]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def _serve() -> None:
    import_compiler()
    server.settle()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), file=answers, flush=True)


def _run(job: dict[str, Any]) -> list[tuple[int, str]]:
    ends = time.monotonic() + job["limit"]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(index) for index in range(len(job["ranks"]))]
        pids = [_fork(job, env, path) for env, path in zip(job["ranks"], outputs, strict=True)]
        codes: dict[int, int] = {}
        while len(codes) < len(pids):
            for pid in pids:
                if pid not in codes and (found := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[pid] = os.waitstatus_to_exitcode(found[1])
            if time.monotonic() > ends:
                for pid in set(pids) - set(codes):
                    os.killpg(pid, signal.SIGKILL)
            time.sleep(0.005)
        return [(codes[pid], path.read_text()) for pid, path in zip(pids, outputs, strict=True)]


def _fork(job: dict[str, Any], env: dict[str, str], output: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    script, code = job["script"], 1
    mark_as_served()
    try:
        os.setsid()
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        for number, name in ((0, "/dev/null"), (1, None), (2, None)):
            os.dup2(os.open(name, os.O_RDONLY) if name else file, number)
        os.environ.update(env)
        os.chdir(job["folder"])
        sys.argv, sys.stdin = [script, *job["arguments"]], open(0)  # noqa: SIM115 - for the life of the process
        sys.path[0] = str(Path(script).parent)
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - whatever a script raises is the test's to see
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
