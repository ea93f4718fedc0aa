"""One rank of an engine, behind distwrap or as the engine's own documentation has it, for `engines.py`."""

from __future__ import annotations

import os
import socket
import sys
import threading
import warnings
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from sharded_ranks import Prepared, Ways, adamw, distwrap_way, rank_main, torch_ddp, torch_fsdp2, torch_zero
from torch import nn

STAGES = (1, 2, 3)
STRATEGIES = {
    **{word: word for word in ("ddp", "zero1", "fsdp", "horovod")},
    **{f"deepspeed {stage}": f"deepspeed(stage={stage})" for stage in STAGES},
}


def deepspeed_by_hand(model: nn.Module, stage: int) -> Prepared:
    """Prepare as DeepSpeed's tutorial does, with the configuration that distwrap gives, and without its compiler.

    Source: https://www.deepspeed.ai/getting-started/
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.utils.logging.set_log_level_from_string("error")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\..*")
    exchange: Any = sys.modules["deepspeed.comm.torch"]
    exchange.build_shm_op = lambda: None  # minutes of a compiler, for an exchange that training never uses
    deepspeed.init_distributed("gloo")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
    }
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=adamw(model), config=config, dist_init_required=False
    )
    return Prepared(engine, optimizer, step=engine_step)


def engine_step(engine: Any, optimizer: Any, x: torch.Tensor) -> None:
    engine.backward(engine(x))
    engine.step()


def horovod_by_hand(model: nn.Module) -> Prepared:
    """Prepare as Horovod's documentation does; rank 0 serves what horovodrun would.

    Source: https://horovod.readthedocs.io/en/stable/pytorch.html
    """
    import horovod.torch as hvd

    address = ("127.0.0.1", int(os.environ["ENGINE_PORT"]))
    if os.environ["RANK"] == "0":
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

        server = RendezvousHTTPServer(address, RendezvousHandler, False)
        server.init([])
        threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        with suppress(ConnectionRefusedError), socket.create_connection(address):
            break
    names = ("RANK", "LOCAL_RANK")
    place = {name: os.environ[name] for name in names} | {"SIZE": os.environ["WORLD_SIZE"], "CROSS_RANK": "0"}
    place |= {"LOCAL_SIZE": place["SIZE"], "CROSS_SIZE": "1", "HOSTNAME": "localhost"}
    meeting = {"GLOO_RENDEZVOUS_ADDR": address[0], "GLOO_RENDEZVOUS_PORT": str(address[1]), "GLOO_IFACE": "lo"}
    kinds = {"CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo"}
    os.environ.update({f"HOROVOD_{name}": value for name, value in (place | meeting | kinds).items()})
    hvd.init()
    optimizer = hvd.DistributedOptimizer(adamw(model), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return Prepared(model, optimizer, meet=hvd.barrier)


def distwrap_engine(model: nn.Module) -> Prepared:
    prepared = distwrap_way(model)
    # Nobody asks for its state: an engine would put it together.
    return Prepared(prepared.model, prepared.optimizer, step=distwrap_step)


def distwrap_step(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    import distwrap

    optimizer.zero_grad()
    distwrap.backward(model(x))
    distwrap.optimizer_step(optimizer)


WAYS: Ways = {
    "torch ddp": torch_ddp,
    "torch fsdp2": torch_fsdp2,
    "torch zero": torch_zero,
    **{f"deepspeed.initialize {stage}": partial(deepspeed_by_hand, stage=stage) for stage in STAGES},
    "horovod.torch": horovod_by_hand,
    **{f"distwrap {word}": distwrap_engine for word in STRATEGIES},
}

if __name__ == "__main__":
    with Connection(int(sys.argv[3])) as conn:
        rank_main(WAYS, STRATEGIES, sys.argv[1], sys.argv[2], conn)
