"""The code style as checks over the syntax tree: each yields `(line, what is wrong and what would be right)`.

They hold for `src`; `test_tidy.py` runs them there, and shows that each catches a planted violation.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

Finding = tuple[int, str]

FUNCTION_LINES_MAX = 70
NESTING_MAX = 4

NAMES_THAT_SAY_NOTHING = {"base", "common", "helper", "helpers", "manager", "misc", "util", "utils"}
BANNED_CALLS = {
    "asyncio.create_task": "a task group, so that the task has an owner",
    "asyncio.ensure_future": "a task group, so that the task has an owner",
    "asyncio.get_event_loop": "asyncio.get_running_loop",
    "datetime.now": "the clock's wall_ms",
    "datetime.utcnow": "the clock's wall_ms",
    "os.system": "subprocess.run",
    "print": "an event, or logging; in the command line, what output.py has: it cleans what it prints",
    "sys.stderr.write": "say of the command line's output.py",
    "sys.stdout.write": "show of the command line's output.py",
    "traceback.print_exception": "say_traceback of the command line's output.py",
}
PASSING_ON = {"raise_later", "set_exception", "throw"}


def no_opening(tree: ast.Module, source: str) -> Iterator[Finding]:
    if not ast.get_docstring(tree):
        yield 1, "a file opens with a docstring: the idea, the rules that hold in it"


def long_function(tree: ast.Module, source: str) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield node.lineno, f"{node.name} has {lines} lines, at most {FUNCTION_LINES_MAX}"


def deep_nesting(tree: ast.Module, source: str) -> Iterator[Finding]:
    blocks = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)

    def visit(node: ast.AST, depth: int) -> Iterator[Finding]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
                yield from visit(child, 0)
                continue
            is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
            deeper = depth + (isinstance(child, blocks) and not is_elif)
            if deeper > NESTING_MAX and deeper > depth:
                yield child.lineno, f"{deeper} levels of nesting, at most {NESTING_MAX}"  # type: ignore[attr-defined]
            yield from visit(child, deeper)

    yield from visit(tree, 0)


def banned_call(tree: ast.Module, source: str) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in BANNED_CALLS:
                yield node.lineno, f"{name}: use {BANNED_CALLS[name]}"


def swallowed_cancellation(tree: ast.Module, source: str) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = "" if node.type is None else ast.unparse(node.type)
        catches_all = node.type is None or "BaseException" in caught
        if catches_all and not any(isinstance(inner, ast.Raise) or _passes_on(inner, node) for inner in ast.walk(node)):
            yield node.lineno, "catches everything and raises nothing: cancellation would be swallowed"


def _passes_on(inner: ast.AST, handler: ast.ExceptHandler) -> bool:
    """Whether it is raised elsewhere: in a coroutine, or where a future is awaited."""
    return (
        isinstance(inner, ast.Call)
        and ast.unparse(inner.func).rpartition(".")[2] in PASSING_ON
        and any(isinstance(given, ast.Name) and given.id == handler.name for given in inner.args)
    )


def unfinished(tree: ast.Module, source: str) -> Iterator[Finding]:
    for number, line in enumerate(source.splitlines(), 1):
        if any(word in line for word in ("TO" + "DO", "FIX" + "ME", "XX" + "X", "raise NotImplemented" + "Error")):
            yield number, "unfinished: finish it, or leave it out and say so in the docs"


def iterated_set(tree: ast.Module, source: str) -> Iterator[Finding]:
    """For the core only: the order of a set of strings differs between processes, and one seed must replay alike."""
    for node in ast.walk(tree):
        iterated: list[ast.expr] = []
        if isinstance(node, ast.For | ast.comprehension):
            iterated.append(node.iter)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"list", "tuple", "iter", "enumerate"}:
            iterated.extend(node.args)
        for expression in iterated:
            is_set = isinstance(expression, ast.Set | ast.SetComp)
            called = isinstance(expression, ast.Call) and ast.unparse(expression.func) in {"set", "frozenset"}
            if is_set or called:
                yield expression.lineno, "iterates over a set: use a dict, or sorted(...)"


def missing_value(tree: ast.Module, source: str) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and node.value is None and isinstance(node.target, ast.Attribute):
            yield node.lineno, f"{ast.unparse(node.target)} is declared without a value: pass it to the constructor"


def repeated_export(tree: ast.Module, source: str) -> Iterator[Finding]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = [ast.literal_eval(item) for item in node.value.elts]  # type: ignore[attr-defined]
            if len(set(names)) != len(names):
                yield node.lineno, "__all__ names something twice"


RULES = (
    no_opening,
    long_function,
    deep_nesting,
    banned_call,
    swallowed_cancellation,
    unfinished,
    missing_value,
    repeated_export,
)
CORE_RULES = (iterated_set,)
CORE = ("_core", "_model", "_wire")
PRINTS = Path("_cli/output.py")


def findings(path: Path, root: Path) -> Iterator[str]:
    source = path.read_text()
    tree = ast.parse(source)
    inside = path.relative_to(root)
    if inside.stem in NAMES_THAT_SAY_NOTHING:
        yield f"{inside}: '{inside.stem}' names no idea"
    rules = RULES + (CORE_RULES if inside.parts[0] in CORE else ())
    for rule in rules:
        if rule is banned_call and inside == PRINTS:
            continue
        for line, message in rule(tree, source):
            yield f"{inside}:{line}: {message}"
