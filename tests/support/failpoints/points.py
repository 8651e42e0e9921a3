"""Every failpoint of both services, found in their source: no line of production code knows of them.

A failpoint is a place at which a process may be killed, stopped or held up: before and behind each await, in each turn of an
`async for`, in the body of an `async with`, and before each statement of the files that write what outlives a process. A new
await is a new failpoint by itself. Numbers follow the order of the files and of the places in them, so that a service and
the test that breaks it count alike.
"""

import ast
import marshal
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import kvkeeper.cache_service
import kvkeeper.engine_service

PACKAGES = {"cache_service": kvkeeper.cache_service, "engine_service": kvkeeper.engine_service}
HIT, HIT_LATER, AROUND = "_failpoint_hit", "_failpoint_hit_later", "_failpoint_around"  # names of the functions called

# What is left behind when the process ends is written by these.
_WRITERS = frozenset({
    "cache_service/core/index/index_record.py",
    "cache_service/memory/disk/disk_directory.py",
    "cache_service/memory/disk/slab.py",
    "cache_service/memory/first_epoch.py",
    "cache_service/memory/kept/index_file.py",
    "cache_service/memory/kept/kept_pool.py",
    "cache_service/memory/kept/memory_directory.py",
    "cache_service/memory/private_file.py",
    "cache_service/runtime/pool_keeper.py",
})  # fmt: skip
# Other processes and the first lines of a program: nothing is there yet, or no event loop.
_SKIPPED = ("text_workers/text_worker.py",)


@dataclass(frozen=True, slots=True)
class Point:
    """One failpoint. is_async: the event loop goes on while it is held up."""

    number: int
    path: str  # from the folder of both packages
    line: int
    what: str
    is_async: bool

    @property
    def name(self) -> str:
        """For reports."""
        return f"{self.path}:{self.line} {self.what}"


def sources() -> dict[str, Path]:
    """The files of both services by their names, in order."""
    found: dict[str, Path] = {}
    for package, module in PACKAGES.items():
        folder = Path(module.__path__[0])
        for path in sorted(folder.rglob("*.py")):
            name = f"{package}/{path.relative_to(folder).as_posix()}"
            if not name.endswith(_SKIPPED):
                found[name] = path
    return found


def all_points() -> list[Point]:
    """Those of every file, each at the place of its number."""
    return list(_compiled()[0])


def write_code(path: Path) -> None:
    """Writes the code of the files with their failpoints, for processes to load: by itself each would need seconds for it."""
    path.write_bytes(_compiled()[1])


def read_code(path: Path) -> dict[str, bytes]:
    """What was written: the marshalled code of each file that has failpoints, by the path of the file here."""
    code: dict[str, bytes] = marshal.loads(path.read_bytes())
    return {str(found): code[name] for name, found in sources().items() if name in code}


@cache
def _compiled() -> tuple[list[Point], bytes]:
    points: list[Point] = []
    code: dict[str, bytes] = {}
    for name, path in sources().items():
        tree, found = instrumented(path.read_bytes(), name, len(points))
        if found:
            code[name] = marshal.dumps(compile(tree, path, "exec", dont_inherit=True))
        points += found
    return points, marshal.dumps(code)


def instrumented(source: bytes, name: str, first: int) -> tuple[ast.Module, list[Point]]:
    """The file with a call at each of its failpoints, and the points, numbered from first on."""
    tree = ast.parse(source)
    adding = _Adding(name, first)
    adding.visit(tree)
    return ast.fix_missing_locations(tree), adding.points


class _Adding(ast.NodeTransformer):
    """Adds the calls, and a point for each."""

    def __init__(self, name: str, first: int) -> None:
        self.points: list[Point] = []
        self._name, self._first = name, first
        self._writes = name in _WRITERS
        self._inside: list[str] = []  # names of the functions around

    def visit_Await(self, node: ast.Await) -> ast.AST:
        """`await x` becomes `await around(before, behind, x)`."""
        text = ast.unparse(node)
        self.generic_visit(node)
        before = self._number(node, f"before {text}", is_async=True)
        behind = self._number(node, f"behind {text}", is_async=True)
        node.value = _call(AROUND, node.value, before, behind)
        return node

    def visit_AsyncFor(self, node: ast.AsyncFor) -> ast.AST:
        self._add_to_body(node, f"async for {ast.unparse(node.target)}")
        return node

    def visit_AsyncWith(self, node: ast.AsyncWith) -> ast.AST:
        self._add_to_body(node, f"async with {ast.unparse(node.items[0])}")
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        self._inside.append(node.name)
        self.generic_visit(node)
        if self._writes:
            self._add_between(node)
        self._inside.pop()
        return node

    def _add_to_body(self, node: ast.AsyncFor | ast.AsyncWith, text: str) -> None:
        number = self._number(node, f"in {text}", is_async=True)
        self.generic_visit(node)
        node.body.insert(0, ast.copy_location(ast.Expr(ast.Await(_call(HIT_LATER, number))), node))

    def _add_between(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Before every statement of a function that is not one inside."""
        blocks: list[list[ast.stmt]] = [function.body]
        while blocks:
            block = blocks.pop()
            statements = list(block)
            block.clear()
            for statement in statements:
                if not _is_docstring(statement):
                    number = self._number(statement, f"before {ast.unparse(statement).splitlines()[0]}", is_async=False)
                    block.append(ast.copy_location(ast.Expr(_call(HIT, number)), statement))
                block.append(statement)
                if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    blocks += [inner for field in ("body", "orelse", "finalbody") if (inner := getattr(statement, field, None))]
                    blocks += [part.body for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ()))]

    def _number(self, node: ast.stmt | ast.expr, what: str, *, is_async: bool) -> ast.Constant:
        number = self._first + len(self.points)
        function = ".".join(self._inside) or "module"
        self.points.append(Point(number, self._name, node.lineno, f"({function}) {what}", is_async))
        return ast.Constant(number)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _call(function: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(function, ast.Load()), list(args), [])
