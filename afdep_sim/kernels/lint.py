"""The lint over the protocol text: what compiles silently and must not, and what does not belong into the text.

The text is plain Python that Numba compiles and the model executes. Some of what Python allows compiles without a
word and is wrong on a GPU: `/` turns integers into floats, and a variable that is assigned on one path only holds
whatever its register held. The rest keeps the text small: no imports beyond the text itself, no floats, no
generators, and attributes of the vocabulary (`ops`), the phases (`ph`) and the constants (`c`, in factories only).

The definite-assignment analysis reads the text as the compiler does: a closure constant of the factory prunes code,
so every inner function is checked once per valuation of the constants that its tests use. A loop may run zero times.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

PACKAGE = "afdep_sim.kernels"
NOT_TEXT = ("__init__.py", "lint.py", "ops.py", "phases.py")
"""Files of the package that are not protocol text. `kernels/cuda/` is not either."""
NOT_IMPORTED = ("cuda", "lint", "ops")
"""Parts of the package that the text must not import: a factory receives its vocabulary."""
HANDLES = ("ops", "ph", "c")
MAX_GUARDS = 10
"""Constants that are enumerated per inner function; further ones count as run-time values, which is stricter."""

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_TRIES = (ast.Try, ast.TryStar)
_STATEMENTS = (
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
    ast.Break,
    ast.Continue,
    ast.Expr,
    ast.For,
    ast.If,
    ast.Pass,
    ast.Return,
    ast.While,
)
"""The statements of an inner function; everything else is reported."""

Problem = tuple[int, str]
Assigned = frozenset[str] | None
"""The names that hold a value on every path to here; None where no path leads."""


def check_text() -> list[str]:
    """Problems of all shipped protocol text, each 'file:line: sentence'; empty when it is clean."""
    return [
        problem
        for path in text_files()
        for problem in check_source(path.read_text(encoding="utf-8"), f"afdep_sim/kernels/{path.name}")
    ]


def text_files() -> list[Path]:
    """The files that hold protocol text, sorted by name."""
    return [path for path in sorted(Path(__file__).parent.glob("*.py")) if path.name not in NOT_TEXT]


def check_source(source: str, filename: str) -> list[str]:
    """Problems of one file's text in line order, each '`filename`:line: sentence'."""
    try:
        module = ast.parse(source)
    except SyntaxError as error:
        return [f"{filename}:{error.lineno or 1}: this is not Python: {error.msg}."]
    problems = set(_everywhere(module))
    factories = [node for node in module.body if isinstance(node, _FUNCTIONS)]
    inside: set[ast.AST] = set()
    for factory in factories:
        constants = _stored(factory.body)
        for function in _inner_functions(factory.body):
            inside.update(node for statement in function.body for node in ast.walk(statement))
            problems.update(_inner(function, constants))
    problems.update(_attributes(module, inside))
    return [f"{filename}:{line}: {sentence}" for line, sentence in sorted(problems)]


# ---- rules that hold in every line of a file ------------------------------------------------------------------------


def _everywhere(module: ast.Module) -> Iterator[Problem]:
    for node in ast.walk(module):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield node.lineno, "'/' makes a float of two integers; use '//'."
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
            yield node.lineno, "'/=' makes a float of two integers; use '//='."
        elif isinstance(node, ast.Constant) and isinstance(node.value, float | complex):
            yield node.lineno, f"the text has integers only, and {node.value!r} is none."
        elif isinstance(node, ast.Yield | ast.YieldFrom):
            yield node.lineno, "the text has no 'yield': a machine switches warps inside its operations."
        elif isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith | ast.AsyncFunctionDef):
            yield node.lineno, "the text has no 'async' and no 'await': a machine switches warps inside its operations."
        elif isinstance(node, ast.Lambda):
            yield node.lineno, "the text has no 'lambda'; write a device function in the factory."
        elif isinstance(node, _TRIES):
            yield node.lineno, "the text has no 'try': nothing raises on a GPU."
        elif isinstance(node, _COMPREHENSIONS):
            yield node.lineno, "the text has no comprehension; write the loop, or use a lane operation."
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from _imports(node)


def _imports(node: ast.Import | ast.ImportFrom) -> Iterator[Problem]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif node.level:
        yield node.lineno, f"a relative import hides what it names; write {PACKAGE} in full."
        return
    elif node.module == PACKAGE:
        names = [f"{PACKAGE}.{alias.name}" for alias in node.names]
    else:
        names = [node.module or ""]
    for name in names:
        inside = name == PACKAGE or name.startswith(PACKAGE + ".")
        if name != "__future__" and not inside:
            yield node.lineno, f"the text imports {PACKAGE} only, not {name}."
        elif inside and name.split(".")[2:3] and name.split(".")[2] in NOT_IMPORTED:
            yield node.lineno, f"{name} is not protocol text, so the text does not import it."


def _attributes(module: ast.Module, inside: set[ast.AST]) -> Iterator[Problem]:
    """Attribute access: `ops.`, `ph.` and, outside the inner functions, `c.`; nothing else has attributes."""
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute):
            base = node.value.id if isinstance(node.value, ast.Name) else ""
            if base == "c" and node in inside:
                yield node.lineno, f"c.{node.attr} is not pruned here; read it into a variable of the factory."
            elif base not in HANDLES:
                yield node.lineno, f"'.{node.attr}' is read of something other than ops, ph or c."
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del) and node.id in HANDLES:
            yield node.lineno, f"{node.id!r} names what the factory received and is not assigned."


# ---- rules of the inner functions -----------------------------------------------------------------------------------


def _inner(function: ast.FunctionDef | ast.AsyncFunctionDef, constants: set[str]) -> Iterator[Problem]:
    """Problems of one function that a factory makes; `constants` are the names that the factory assigns."""
    for node in (node for statement in function.body for node in ast.walk(statement)):
        if isinstance(node, ast.stmt) and not isinstance(node, (*_STATEMENTS, *_TRIES)):
            yield node.lineno, f"'{type(node).__name__}' is no statement of a kernel function."
        elif isinstance(node, ast.NamedExpr):
            yield node.lineno, "':=' assigns inside an expression; give it a line of its own."
    parameters = _parameters(function.args)
    for name in sorted(parameters.intersection(HANDLES)):
        yield function.lineno, f"{name!r} names what the factory received and is no parameter here."
    local = parameters | _stored(function.body)
    guards = sorted({name for test in _tests(function.body) for name in _guards(test)} & constants - local)
    for values in product((False, True), repeat=len(guards[:MAX_GUARDS])):
        known = dict(zip(guards, values, strict=False))
        analysis = _Analysis(local, known)
        analysis.block(function.body, frozenset(parameters))
        yield from analysis.problems


def _inner_functions(body: Sequence[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The outermost functions among `body` and the statements inside it."""
    for statement in body:
        if isinstance(statement, _FUNCTIONS):
            yield statement
        else:
            yield from _inner_functions([n for n in ast.iter_child_nodes(statement) if isinstance(n, ast.stmt)])


def _parameters(arguments: ast.arguments) -> set[str]:
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return {argument.arg for argument in every if argument is not None}


def _stored(body: Sequence[ast.stmt]) -> set[str]:
    """Names assigned by `body` itself; functions defined in it are names, their insides are not searched."""
    names: set[str] = set()
    queue: list[ast.AST] = list(body)
    while queue:
        node = queue.pop()
        if isinstance(node, _FUNCTIONS):
            names.add(node.name)
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        queue.extend(ast.iter_child_nodes(node))
    return names


def _tests(body: Sequence[ast.stmt]) -> Iterator[ast.expr]:
    for node in (node for statement in body for node in ast.walk(statement)):
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            yield node.test
        elif isinstance(node, ast.BoolOp):
            yield node


def _guards(test: ast.expr) -> Iterator[str]:
    """Names whose truth alone decides (a part of) `test`."""
    if isinstance(test, ast.Name):
        yield test.id
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _guards(test.operand)
    elif isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _guards(value)


class _Analysis:
    """Definite assignment in one inner function, for one valuation of the closure constants in `known`.

    `problems` holds a (line, sentence) for each read of a local name that some path leaves without a value.
    """

    def __init__(self, local: set[str], known: Mapping[str, bool]) -> None:
        self.local = local
        self.known = known
        self.problems: set[Problem] = set()
        self.breaks: list[list[Assigned]] = []

    def block(self, body: Sequence[ast.stmt], state: Assigned) -> Assigned:
        """The names assigned after `body`, given those before it; None when `body` never reaches its end."""
        for statement in body:
            if state is None:
                return None
            state = self.statement(statement, state)
        return state

    def statement(self, node: ast.stmt, state: frozenset[str]) -> Assigned:
        match node:
            case ast.Assign():
                self.read(node.value, state)
                return self.store(node.targets, state)
            case ast.AnnAssign():
                if node.value is None:
                    return state
                self.read(node.value, state)
                return self.store([node.target], state)
            case ast.AugAssign():
                self.read(node.value, state)
                if isinstance(node.target, ast.Name):
                    self.name(node.target, state)
                return self.store([node.target], state)
            case ast.If():
                self.read(node.test, state)
                verdict = self.verdict(node.test)
                then = None if verdict is False else self.block(node.body, state)
                otherwise = None if verdict is True else self.block(node.orelse, state)
                return _meet([then, otherwise])
            case ast.For() | ast.While():
                return self.loop(node, state)
            case ast.Return():
                if node.value is not None:
                    self.read(node.value, state)
                return None
            case ast.Break():
                if self.breaks:
                    self.breaks[-1].append(state)
                return None
            case ast.Continue():
                return None
            case ast.Expr():
                self.read(node.value, state)
        return state

    def loop(self, node: ast.For | ast.While, state: frozenset[str]) -> Assigned:
        """Nothing is ever unassigned, so the first turn has the fewest names and what follows has those of `state`."""
        ends = True
        runs = True
        inside: Assigned = state
        if isinstance(node, ast.While):
            self.read(node.test, state)
            verdict = self.verdict(node.test)
            ends, runs = verdict is not True, verdict is not False
        else:
            self.read(node.iter, state)
            inside = self.store([node.target], state)
        self.breaks.append([])
        if runs:
            self.block(node.body, inside)
        left = self.breaks.pop()
        return _meet([self.block(node.orelse, state if ends else None), *left])

    def store(self, targets: Sequence[ast.expr], state: frozenset[str]) -> frozenset[str]:
        for target in targets:
            if isinstance(target, ast.Name):
                state |= {target.id}
            elif isinstance(target, ast.Tuple | ast.List):
                state = self.store(target.elts, state)
            elif isinstance(target, ast.Starred):
                state = self.store([target.value], state)
            else:
                self.read(target, state)
        return state

    def verdict(self, test: ast.expr) -> bool | None:
        """What `test` is known to be under this valuation; None for a run-time test."""
        if isinstance(test, ast.Constant):
            return bool(test.value)
        if isinstance(test, ast.Name):
            return self.known.get(test.id)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.verdict(test.operand)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp):
            decisive = isinstance(test.op, ast.Or)
            values = [self.verdict(value) for value in test.values]
            if decisive in values:
                return decisive
            return None if None in values else not decisive
        return None

    def read(self, node: ast.AST, state: frozenset[str]) -> None:
        """Check every name that evaluating `node` reads; what the constants prune is not read."""
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                self.name(node, state)
        elif isinstance(node, ast.IfExp):
            self.read(node.test, state)
            verdict = self.verdict(node.test)
            if verdict is not False:
                self.read(node.body, state)
            if verdict is not True:
                self.read(node.orelse, state)
        elif isinstance(node, ast.BoolOp):
            for value in node.values:
                self.read(value, state)
                if self.verdict(value) is isinstance(node.op, ast.Or):
                    return
        else:
            for child in ast.iter_child_nodes(node):
                self.read(child, state)

    def name(self, node: ast.Name, state: frozenset[str]) -> None:
        if node.id in self.local and node.id not in state:
            self.problems.add((node.lineno, f"{node.id!r} is read here but not assigned on every path to here."))


def _meet(states: Sequence[Assigned]) -> Assigned:
    """What holds after any of `states`; paths that end elsewhere do not count."""
    reached = [state for state in states if state is not None]
    return frozenset.intersection(*reached) if reached else None
