"""What the package replaces in classes, modules and objects of others, outside of _internals: each with its reason.

A method of another's class is never replaced. What is found in the files: an attribute of an imported class or module
that is set or deleted, `__class__` of any object, `forward` of another object, and uses of `replaced()`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.house.package import PACKAGE, nodes

_STREAMS = "Python's own place for a stream of the process"
_HOOK = "Python's own place for what is called with an uncaught exception"
_LOADER = "a copy of the user's loader that is to pass for one: the data room's own affair"
_WHOLE = "a parameter that the model no longer has: any use of it is to be an error"
ALLOWED = {
    ("data/loader.py", "loader.__class__"): "local_model's loader is the user's own object",
    ("data/sharded.py", "sampler.__class__"): "the order of a RandomSampler is to be known, and the sampler is shared",
    ("data/sharded.py", "loader.__class__"): _LOADER,
    ("data/sharded.py", "result.__class__"): _LOADER,
    ("data/workers.py", "sys.excepthook"): _HOOK,
    ("devices/transfer.py", "parameter.__class__"): "restores the class that torch's own move has lost",
    ("devices/transfer.py", "torch.empty(0).data"): "a tensor made here, to ask what torch accepts",
    ("group/failures.py", "sys.excepthook"): _HOOK,
    ("launch/fork.py", "sys.stdin"): _STREAMS,
    ("launch/fork.py", "sys.stdout"): _STREAMS,
    ("launch/fork.py", "sys.stderr"): _STREAMS,
    ("launch/logs.py", "sys.stdout"): _STREAMS,
    ("launch/logs.py", "sys.stderr"): _STREAMS,
    ("launch/server.py", "sys.stdin"): _STREAMS,
    ("launch/signals.py", "sys.excepthook"): _HOOK,
    ("model/forward_routing.py", "module.forward"): "gives a module of the user's its own forward back",
    (
        "model/gradients.py",
        "weakref.finalize(model, _remove, self._handles).atexit",
    ): "documented, of an object made here",
    ("prove/proof.py", "ElementTree.SubElement(case, 'failure', message=self.verdict).text"): "of an element made here",
    ("prove/world.py", "tempfile.tempdir"): "documented: the folder of a proof's temporary files, in its own process",
    ("prove/world.py", "sys.argv"): "of a script, in a process that is the script's alone",
    ("prove/world.py", "replaced"): "in the process of a proof, which is the program's alone and ends with it",
    ("standard_input.py", "sys.stdin"): _STREAMS,
    ("strategies/parameter_swap.py", "parameter.__class__"): _WHOLE,
    ("strategies/divided_tensors.py", "whole.__class__"): _WHOLE,
    ("strategies/fsdp/recomputation.py", "unit.forward"): "of an instance: torch's checkpoint around a unit's forward",
    ("strategies/pipeline/model.py", "self.model.forward"): "of an instance: model(x) goes through the stages",
    ("timing/instruments.py", "replaced"): "measures calls of the loop, between the start and the end of a run",
}

# Each is an offence; the names are imported before.
PLANTED = (
    "torch.save = mine",
    "nn.Linear.forward = mine",
    "del DTensor.__torch_function__",
    "setattr(torch.Tensor, 'item', mine)",
    "optimizer.__class__ = Mine",
    "unit.forward = mine",
    "def f():\n    with replaced([(torch, 'save', mine)]): pass",
)
PLAIN = (
    "class Mine:\n    def __init__(self): self.forward = self.own\nmine = Mine()\nmine.step = 3\nsetattr(mine, 'a', 1)"
)
_IMPORTS = "import torch\nfrom torch import nn\nfrom torch.distributed.tensor import DTensor\n"


def problems(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Yield what is replaced without a reason, and each reason for which there is nothing any more."""
    found = {
        (path.relative_to(PACKAGE).as_posix(), what): line
        for path, tree in trees.items()
        if "_internals" not in path.parts
        for line, what in replacements(tree)
    }
    for (path, what), line in found.items():
        if (path, what) not in ALLOWED:
            yield f"{path}:{line} replaces {what}, another's: use a hook or a subclass, or move it to _internals"
    for path, what in ALLOWED.keys() - found.keys():
        yield f"{path} does not replace {what} any more: take it off the list in tests/house/replaced.py"
    for code in PLANTED:
        if len(list(replacements(ast.parse(_IMPORTS + code)))) != 1:
            yield f"This replacement would not be seen: {code}"
    for line, what in replacements(ast.parse(PLAIN)):
        yield f"plain code, line {line}: {what} is no replacement"


def replacements(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each replacement in a module."""
    imported = {alias for node in nodes(tree) for alias in _imported(node)}
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            is_forward = node.attr == "forward" and ast.unparse(node.value) not in ("self", "cls")
            if node.attr == "__class__" or is_forward or _root(node.value) in imported:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "replaced":
                yield node.lineno, "replaced"
            elif node.func.id in ("setattr", "delattr") and _root(node.args[0]) in imported:
                yield node.lineno, ast.unparse(node.args[0])


def _imported(node: ast.AST) -> Iterator[str]:
    """Yield the names of classes, functions and modules of others that a statement imports."""
    if isinstance(node, ast.Import) or (
        isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("distwrap")
    ):
        yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)


def _root(node: ast.expr) -> str:
    """Return the name at which an expression begins."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
