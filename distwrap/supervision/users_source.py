"""Facts from the user's source: the line at which an object was made, and the object over which a loop iterates.

Only names and attributes are looked up, in the functions that are under way: no code of the user's runs.
"""

import ast
import inspect
import linecache
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from types import FrameType
from typing import Any

from distwrap.places import place
from distwrap.supervision import stacks


def users_frames() -> Iterator[FrameType]:
    """Yield the frames of the user's code in which this thread is, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        if stacks.is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def place_of(frame: FrameType | None, line: int | None = None) -> str:
    """Return the place of a frame, for messages; empty where there is none."""
    return "" if frame is None else place(frame.f_code.co_filename, line or frame.f_lineno)


def where_made(value: object) -> str:
    """Return the file and line at which a value was assigned; empty if no running function holds the value."""
    for frame in users_frames():
        for name, held in frame.f_locals.items():
            if held is value:
                lines = [line for line in _assignments(frame, partial(_is_name, name)) if line <= frame.f_lineno]
                own = [line for line in lines if line >= frame.f_code.co_firstlineno]
                if own:
                    return place_of(frame, own[-1])
            attributes = getattr(held, "__dict__", None)
            for attribute, inner in attributes.items() if type(attributes) is dict else ():
                if inner is value and (lines := _assignments(frame, partial(_is_attribute, attribute))):
                    return place_of(frame, lines[0])
    return ""


def loops_around(frame: FrameType) -> Iterator[tuple[str, list[Any]]]:
    """Yield the ``for`` loops in which a frame is, the innermost first: its place, and what it iterates over."""
    loops = [node for node in _nodes(frame, ast.For) if node.lineno <= frame.f_lineno <= (node.end_lineno or 0)]
    for loop in sorted(loops, key=lambda each: -each.lineno):
        if loop.lineno >= frame.f_code.co_firstlineno:
            yield place_of(frame, loop.lineno), [_value(node, frame) for node in ast.walk(loop.iter)]


def _value(node: ast.AST, frame: FrameType) -> Any:
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, frame), "__dict__", {}).get(node.attr)
    return None


def _assignments(frame: FrameType, is_wanted: Callable[[ast.AST], bool]) -> list[int]:
    lines = []
    for node in (*_nodes(frame, ast.Assign), *_nodes(frame, ast.AnnAssign)):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if any(map(is_wanted, target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target])):
                lines.append(node.lineno)
    return sorted(lines)


def _is_name(name: str, target: ast.AST) -> bool:
    return isinstance(target, ast.Name) and target.id == name


def _is_attribute(name: str, target: ast.AST) -> bool:
    return isinstance(target, ast.Attribute) and target.attr == name


def _nodes(frame: FrameType, kind: type[Any]) -> list[Any]:
    return [node for node in ast.walk(_tree(frame.f_code.co_filename)) if isinstance(node, kind)]


@lru_cache(maxsize=16)
def _tree(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # a notebook's cell with magic words
        return ast.Module([], [])
