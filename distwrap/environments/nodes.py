"""Launchers that start one process on each node, and leave the ranks there to it.

Their RANK and WORLD_SIZE, where there are any, count nodes: a process that took them for ranks would train with one
device on each node, or wait forever. Sources: training-operator's pkg/controller.v1/pytorch/envvar.go and Trainer's
pkg/constants (Kubeflow); PAI's "general environment variables" (Alibaba DLC); sagemaker-training-toolkit's
ENVIRONMENT_VARIABLES.md; Lightning's environment "LightningEnvironment" (NODE_RANK by hand).
"""

import json
from collections.abc import Mapping

from distwrap.environments.base import Node
from distwrap.environments.variables import DEFAULT_PORT, quote, read_int, require
from distwrap.errors import PlacementError


def detect_kubeflow(env: Mapping[str, str]) -> Node | str:
    """Read torchrun's options as PET_… variables, of PyTorchJob (v1: RANK is the pod's number) and Trainer (v2)."""
    if "PET_NNODES" not in env:
        return "no PET_NNODES"
    if "LOCAL_RANK" in env:
        return "LOCAL_RANK is set: a launcher inside of the pod has made ranks"
    fewest, _, most = env["PET_NNODES"].partition(":")
    nnodes = env["PET_NNODES"] if most not in ("", fewest) else read_int({"PET_NNODES": fewest}, "PET_NNODES")
    nprocs = _nprocs(env, "PET_NPROC_PER_NODE")
    sizes = () if isinstance(nnodes, str) or nprocs is None else (nnodes * nprocs, nnodes)
    if sizes and "WORLD_SIZE" in env and read_int(env, "WORLD_SIZE") not in sizes:
        raise PlacementError(
            f"{quote(env, ('WORLD_SIZE', 'PET_NNODES', 'PET_NPROC_PER_NODE'))} contradict each other: "
            f"{nnodes} x {nprocs} is {sizes[0]}."
        )
    restarts = read_int(env, "PET_MAX_RESTARTS") if "PET_MAX_RESTARTS" in env else None
    if nnodes == 1:
        return Node(1, 0, nprocs, None, "kubeflow", restarts)
    name = next((name for name in ("PET_NODE_RANK", "RANK") if name in env), None)
    if isinstance(nnodes, int) and name is None and "PET_RDZV_ENDPOINT" not in env:
        raise PlacementError(f"PET_NNODES={nnodes}, but neither PET_NODE_RANK nor RANK says which pod this is.")
    node_rank = None if name is None else read_int(env, name)
    return Node(nnodes, node_rank, nprocs, _endpoint(env, "PET_"), "kubeflow", restarts)


def detect_pai_dlc(env: Mapping[str, str]) -> Node | str:
    """Read the variables of Alibaba PAI DLC: RANK and WORLD_SIZE count nodes, NPROC_PER_NODE the ranks on each."""
    if "NPROC_PER_NODE" not in env or "RANK" not in env:
        return "no NPROC_PER_NODE with RANK"
    if "LOCAL_RANK" in env:
        return "LOCAL_RANK is set: a launcher inside of the node has made ranks"
    require(env, ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "pai_dlc")
    nnodes, node_rank = read_int(env, "WORLD_SIZE"), read_int(env, "RANK")
    return Node(nnodes, node_rank, _nprocs(env, "NPROC_PER_NODE"), _endpoint(env), "pai_dlc")


def detect_by_hand(env: Mapping[str, str]) -> Node | str:
    """Read MASTER_ADDR=… MASTER_PORT=… WORLD_SIZE=nodes NODE_RANK=… LOCAL_RANK=0, as people type on each node."""
    if "NODE_RANK" not in env:
        return "no NODE_RANK"
    if "RANK" in env:
        return "RANK is set"
    if env.get("LOCAL_RANK", "0") != "0":
        return f"LOCAL_RANK={env['LOCAL_RANK']}"
    if "WORLD_SIZE" not in env or "MASTER_ADDR" not in env:
        return "no WORLD_SIZE and MASTER_ADDR"
    return Node(read_int(env, "WORLD_SIZE"), read_int(env, "NODE_RANK"), None, _endpoint(env), "node_rank")


def detect_sagemaker(env: Mapping[str, str]) -> Node | str:
    """Read the list of hosts that SageMaker sets where it starts neither MPI nor torchrun."""
    if "SM_TRAINING_ENV" not in env and "SM_HOSTS" not in env:
        return "no SM_HOSTS"
    require(env, ("SM_HOSTS", "SM_CURRENT_HOST"), "sagemaker")
    try:
        hosts = [str(host) for host in json.loads(env["SM_HOSTS"])]
    except (ValueError, TypeError):
        raise PlacementError(f"SM_HOSTS={env['SM_HOSTS']!r} is not a JSON list of hosts.") from None
    if env["SM_CURRENT_HOST"] not in hosts:
        raise PlacementError(f"{quote(env, ('SM_CURRENT_HOST', 'SM_HOSTS'))}: the host is not among them.")
    gpus = read_int(env, "SM_NUM_GPUS", default=0)
    endpoint = f"{hosts[0]}:{env.get('MASTER_PORT', DEFAULT_PORT)}" if len(hosts) > 1 else None
    return Node(len(hosts), hosts.index(env["SM_CURRENT_HOST"]), gpus or None, endpoint, "sagemaker")


def _nprocs(env: Mapping[str, str], name: str) -> int | None:
    """Return the number of ranks on this node; ``None`` for torchrun's words (auto, gpu, cpu)."""
    return int(env[name]) if env.get(name, "").isdigit() else None


def _endpoint(env: Mapping[str, str], prefix: str = "") -> str:
    if f"{prefix}RDZV_ENDPOINT" in env:
        return env[f"{prefix}RDZV_ENDPOINT"]
    address = env.get(f"{prefix}MASTER_ADDR") or env.get("MASTER_ADDR")
    port = env.get(f"{prefix}MASTER_PORT") or env.get("MASTER_PORT") or str(DEFAULT_PORT)
    if not address:
        raise PlacementError(f"there are several nodes, but no {prefix}MASTER_ADDR says where they meet.")
    if not port.isdigit():
        raise PlacementError(f"MASTER_PORT={port!r} is not a whole number.")
    return f"{address}:{port}"
