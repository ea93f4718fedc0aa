"""Hold a Jupyter kernel for a test, in a process of its own: jupyter_client leaves event loops and sockets behind.

Reads a JSON line for each cell, `{"code": …, "interrupt": [files]}`, and answers with what came of it. The interrupt
is sent when the files are there.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from typing import Any

import nbformat
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

LIMIT = 100


def main() -> None:
    answers = open(os.dup(1), "w", buffering=1)  # noqa: SIM115
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # a kernel repeats its output on its own standard output
    manager = KernelManager()
    # ipykernel leaves the descriptors alone where it believes to be in one of its own tests.
    env = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
    client = NotebookClient(nbformat.v4.new_notebook(), km=manager, timeout=LIMIT)
    manager.start_kernel(env={**env, "DISTWRAP_QUIET": "0", "DISTWRAP_TRACEBACK": ""})
    client.kc = manager.client()
    client.kc.start_channels()
    client.kc.wait_for_ready(timeout=LIMIT)
    client.reset_execution_trackers()
    try:
        for line in sys.stdin:
            print(json.dumps(_run(client, manager, **json.loads(line))), file=answers)
    finally:
        client.kc.stop_channels()
        manager.shutdown_kernel(now=True)


def _run(client: NotebookClient, manager: KernelManager, code: str, interrupt: list[str]) -> dict[str, Any]:
    cell = nbformat.v4.new_code_cell(code)
    client.nb.cells.append(cell)
    sent: list[float] = []
    if interrupt:
        threading.Thread(target=_interrupt, args=(manager, interrupt, sent), daemon=True).start()
    error, text = "", ""
    try:
        client.execute_cell(cell, len(client.nb.cells) - 1)
    except CellExecutionError as failure:
        error, text = failure.ename, re.sub(r"\x1b\[[0-9;]*m", "", str(failure))
    printed = [output.get("text", "") or str(output.get("data", {}).get("text/plain", "")) for output in cell.outputs]
    seconds = time.monotonic() - sent[0] if sent else 0.0
    return {
        "number": cell.execution_count,
        "printed": "".join(printed),
        "error": error,
        "text": text,
        "seconds": seconds,
    }


def _interrupt(manager: KernelManager, files: list[str], sent: list[float]) -> None:
    deadline = time.monotonic() + LIMIT / 2
    while not all(map(os.path.exists, files)) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.3)
    sent.append(time.monotonic())
    manager.interrupt_kernel()


if __name__ == "__main__":
    main()
