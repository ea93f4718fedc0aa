"""Our count of bytes against the kernel's, on the interfaces of two hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clusters.namespaces import Hosts
from tests.clusters.running import environment

PROGRAM = """
import json, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from distwrap import barrier, distributed, rank, wrap_model, wrap_optimizer
from distwrap.comm import traffic

def kernels():
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())

def sent_again():
    lines = Path("/proc/net/snmp").read_text().splitlines()
    names, numbers = (line.split() for line in lines if line.startswith("Tcp:"))
    return int(dict(zip(names, numbers))["RetransSegs"])

@distributed(timeout=60)
def main(comms):
    found = {}
    for comm in comms:
        model = wrap_model(nn.Linear(1000, 1000), comm=comm)
        optimizer = wrap_optimizer(torch.optim.Adam(model.parameters()), model)
        for step in range(6):
            if step == 2:
                barrier()
                counted, seen, again = traffic(model).sent, kernels(), sent_again()
            optimizer.zero_grad()
            model(torch.ones(1, 1000)).sum().backward()
            optimizer.step()
        barrier()
        found[comm] = (traffic(model).sent - counted, kernels() - seen, sent_again() - again)
    print("FOUND", json.dumps(found), flush=True)

main(json.loads(sys.argv[1]))
"""
COMMS = ["allreduce", "fp16", "bytegrad", "qadam(warmup_steps=1, bits=1)", "local_sgd(sync_every=1)"]


@pytest.mark.nightly(row="hosts", why="comm/test_bytes.py, by what DDP sends")
@pytest.mark.slow("sends and counts on hosts of its own")
def test_what_we_count_is_what_leaves_the_host(two_hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    ranks = [
        subprocess.Popen(
            two_hosts.command(name, sys.executable, str(tmp_path / "program.py"), json.dumps(COMMS)),
            env=environment(
                RANK=str(number),
                WORLD_SIZE="2",
                LOCAL_RANK="0",
                LOCAL_WORLD_SIZE="1",
                MASTER_ADDR=two_hosts.address(two_hosts.names[0]),
                MASTER_PORT="29411",
                GLOO_SOCKET_IFNAME="eth0",
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, name in enumerate(two_hosts.names)
    ]
    try:
        printed = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for text in printed:
        assert "FOUND" in text, text
        for comm, (counted, seen, again) in json.loads(text.partition("FOUND ")[2].splitlines()[0]).items():
            # Headers of TCP, IP and Ethernet, acknowledgements, and messages of gloo's and of our side channel.
            # Where all cores are busy TCP takes a slow answer for a loss, and sends segments of 1514 bytes again.
            assert counted <= seen <= counted * 1.1 + 60_000 + 1514 * again, comm
