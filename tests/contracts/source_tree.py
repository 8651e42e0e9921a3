"""The source tree as the contracts see it: its packages, their modules and their classes. Reads source, imports none of it."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("cache_service", "engine_service")
_CLIENT = ROOT / "clients" / "python" / "kvkeeper"


def package_roots() -> list[Path]:
    """Folders of kvkeeper's packages: at the top, in a folder at the top, or beside the Python client; each once."""
    places = [*ROOT.glob("[!.]*"), *ROOT.glob("[!.]*/*"), *_CLIENT.iterdir()]
    packages = {path for path in places if (path / "__init__.py").is_file() and not path.is_symlink()}
    return sorted(path for path in packages if path.parent not in packages and ROOT / "tests" not in path.parents)


def folders(*roots: Path) -> list[Path]:
    """Each root and the folders of modules below it."""
    return sorted({file.parent for root in roots for file in root.rglob("*.py")})


def modules(folder: Path) -> list[Path]:
    """Modules that lie in the folder itself, without its `__init__.py`."""
    return sorted(file for file in folder.glob("*.py") if file.name != "__init__.py")


def name_of(path: Path) -> str:
    """Of a file or a folder, as it is written in a message: relative to the repository."""
    return str(path.relative_to(ROOT))


def classes(*roots: Path) -> Iterator[tuple[Path, str, list[str]]]:
    """File, class, and the names of its bases as they are defined: without modules, type parameters and aliases."""
    for file in sorted(file for root in roots for file in root.rglob("*.py")):
        text = file.read_text()
        if "class " not in text:
            continue
        nodes = list(ast.walk(ast.parse(text)))
        imported = [alias for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
        real_names = {alias.asname: alias.name for alias in imported if alias.asname}
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                names = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
                yield file, node.name, [real_names.get(name, name) for name in names]
