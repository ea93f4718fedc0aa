"""Make random numbers of a training loop differ among ranks, after models and data are made alike on all."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.facts import Loop, TrainingLoop
from distwrap.convert.names import DRAWS, DRAWS_IN_PLACE, SEEDS
from distwrap.convert.script import Function, argument, path_of
from distwrap.convert.values import root_of


def draw_apart(conversion: Conversion) -> None:
    """Seed each rank differently before training begins, if its loop draws random batches or noise."""
    begun: set[cst.CSTNode] = set()  # statements before which a seed is written
    for each in conversion.facts.training_loops:
        code = code_of(conversion, each.body)
        if each.body is not each.loop:
            code += code_of(conversion, each.loop)
        drawing = [node for node in code if any(_draws(conversion, node))]
        if drawing:
            _seed_before(conversion, each, drawing, begun)
    _seed_what_is_drawn_by_the_seed(conversion)


def code_of(conversion: Conversion, start: cst.CSTNode) -> list[cst.CSTNode]:
    """Return the code that a piece of code runs: itself, the file's functions, and methods of objects it uses."""
    script, values = conversion.script, conversion.facts.values
    found, waiting = [start], [start]
    seen: set[tuple[Function | None, str]] = set()
    while waiting:
        for node in script.expressions(waiting.pop()):
            path = path_of(node)
            if path is None or (script.function_of(node), path) in seen:
                continue
            seen.add((script.function_of(node), path))
            more: list[cst.CSTNode] = [values.functions[path]] if path in values.functions else []
            for source in [root_of(each) for each in values.sources(node) if each is not None] if not more else ():
                owner = values.classes.get(path_of(source.func) or "") if isinstance(source, cst.Call) else None
                if owner is not None and not any("Dataset" in script.code(each) for each in owner.bases):
                    methods = script.find(cst.FunctionDef, owner.body)
                    more += [each for each in methods if each.name.value != "__init__"]
            new = [each for each in more if each not in found]
            found, waiting = found + new, waiting + new
    return found


def _draws(conversion: Conversion, node: cst.CSTNode) -> Iterator[cst.Call]:
    """Yield the calls in a piece of code that draw from the generators of the whole process."""
    script = conversion.script
    for call in script.find(cst.Call, node):
        if argument(call, "generator") is not None:
            continue
        name = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
        if script.names(call.func) & DRAWS or name in DRAWS_IN_PLACE:
            yield call
        elif name in ("sample", "rsample") and isinstance(call.func, cst.Attribute):
            sources = conversion.facts.values.sources(call.func.value)
            if any(_is_distribution(conversion, each) for each in sources if each is not None):
                yield call


def _is_distribution(conversion: Conversion, node: cst.BaseExpression) -> bool:
    return isinstance(node, cst.Call) and any(
        name.startswith("torch.distributions.") for name in conversion.script.names(node.func)
    )


def _seed_before(
    conversion: Conversion, loop: TrainingLoop, drawing: list[cst.CSTNode], begun: set[cst.CSTNode]
) -> None:
    script = conversion.script
    first = next(call for node in drawing for call in _draws(conversion, node))
    statement = _beginning(conversion, loop.loop)
    fix = "seed_everything(seed, apart=True) once the models and the data are made"
    if statement is None or "torch" not in script.bound_names or not conversion.may_change(statement):
        conversion.left(first, "draws", "all ranks draw the same numbers here, and do the work of one", fix)
        return
    names = {each.name.value for each in drawing if isinstance(each, cst.FunctionDef)}
    statement = _first_that_draws(conversion, statement, names)
    if statement not in begun:
        begun.add(statement)
        seed = "int(torch.randint(2**31, ()))"  # from the script's own generator, which is alike on all ranks here
        conversion.edits.line_before(statement, conversion.call("seed_everything", f"{seed}, apart=True"))
        conversion.done(statement, "draws", "from here on each rank draws numbers of its own, from a seed alike on all")
    if not any(conversion.facts.loader_of(conversion.facts.iterated(loop.loop))):
        conversion.own_batches.add(loop.loop)
    conversion.done(first, "draws", "each rank draws its own, so a step sees as many times more as there are ranks")
    _average_estimates(conversion, names)


def _beginning(conversion: Conversion, loop: Loop) -> cst.BaseStatement | None:
    """Return the statement of the ranks' function that begins training: the outermost loop or a call of it, or None."""
    script, node = conversion.script, loop
    outermost: cst.CSTNode = node
    for _ in range(5):
        for each in script.ancestors(outermost):
            if isinstance(each, cst.FunctionDef):
                break
            if isinstance(each, (cst.For, cst.While)):
                outermost = each
        function = script.function_of(outermost)
        if function is None or function is conversion.reach.entry:
            return script.statement_of(outermost)
        calls = [each for each in _callers(conversion, function) if script.function_of(each) is not function]
        if len(calls) != 1:
            return None
        outermost = calls[0]
    return None


def _callers(conversion: Conversion, function: Function) -> list[cst.Call]:
    """Return the calls of a function; for a method, the calls by its name if only one class defines it."""
    script, values = conversion.script, conversion.facts.values
    found = values.callers(function)
    if found or script.class_of(function) is None:
        return found
    name = function.name.value
    alike = [each for each in script.find(cst.FunctionDef) if each.name.value == name]
    return [call for call, _ in script.method_calls(name)] if len(alike) == 1 else []


def _first_that_draws(conversion: Conversion, begin: cst.BaseStatement, names: set[str]) -> cst.BaseStatement:
    """Return the first statement after the models and optimizers are made that draws as the loop does."""
    script, facts = conversion.script, conversion.facts
    block = list(script.siblings(begin))
    made = [*facts.optimizer_calls(), *conversion.wrapped_expressions]
    found = begin
    for each in reversed(block[: block.index(begin)]):
        if any(script.inside(node, each) for node in made):
            break
        is_definition = isinstance(each, (cst.FunctionDef, cst.ClassDef))
        if isinstance(each, cst.BaseStatement) and not is_definition:
            found = each if any(path_of(call.func) in names for call in script.find(cst.Call, each)) else found
    return found


def _average_estimates(conversion: Conversion, names: set[str]) -> None:
    """Average the results of evaluation functions whose data each rank now draws for itself."""
    script, facts = conversion.script, conversion.facts
    for function in facts.values.functions.values():
        returns = [each for each in script.find(cst.Return, function) if script.function_of(each) is function]
        reached = {each.name.value for each in facts.reached(function)} | {function.name.value}
        evaluates = any(script.method_calls("eval", function))  # rather than choose actions, for example
        if not evaluates or not _is_without_gradients(conversion, function) or not reached & names or not returns:
            continue
        for call in facts.values.callers(function):
            if isinstance(script.parent(call), cst.Expr) or not conversion.may_change(call):
                continue
            if call not in conversion.averaged:
                conversion.averaged.add(call)
                conversion.wrap(call, "reduce")
                conversion.done(call, "metric", "the mean over the ranks, each of which evaluates what it draws")


def _is_without_gradients(conversion: Conversion, function: Function) -> bool:
    script = conversion.script
    blocks = [item.item for block in script.find(cst.With, function) for item in block.items]
    decorators = [each.decorator for each in function.decorators]
    return any(script.is_a(each, "torch.no_grad", "torch.inference_mode") for each in (*blocks, *decorators))


def _seed_what_is_drawn_by_the_seed(conversion: Conversion) -> None:
    """Seed the ranks alike if a script draws its seed, which would differ on each rank."""
    script = conversion.script
    for call in script.calls(*SEEDS):
        given = call.args[0].value if call.args else None
        sources = [] if given is None else [*conversion.facts.values.sources(given), *_of_attribute(conversion, given)]
        drawn = [each for each in sources if each is not None and any(_draws(conversion, each))]
        if drawn and "seed" not in conversion.decorator_options and conversion.on_ranks(drawn[0]):
            conversion.decorator_options["seed"] = "0"
            conversion.done(drawn[0], "seed", "each rank would draw a seed of its own; seed=0 lets them draw alike")


def _of_attribute(conversion: Conversion, node: cst.BaseExpression) -> list[cst.BaseExpression]:
    """Return the values assigned to an attribute such as ``opt.seed``, in any function."""
    path, bindings = path_of(node), conversion.facts.values.bindings
    found = [each for (_, name), some in bindings.items() if name == path for each in some]
    return [each.value for each in found if each.value is not None]
