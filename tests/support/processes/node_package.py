"""The Node client as a project elsewhere gets it: packed and installed, without a network."""

import os
import shutil
import subprocess
from pathlib import Path

NODE_CLIENT = Path(__file__).parents[3] / "clients" / "node"


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """What the command printed; it has to succeed."""
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def install(folder: Path) -> Path:
    """Makes a project of a folder. Of the checkout it has nothing but the packages that ours depends on."""
    assert (NODE_CLIENT / "node_modules").is_dir(), "run `npm ci` in clients/node first (make test does)"
    run("npm", "pack", "--pack-destination", folder, cwd=NODE_CLIENT)
    (archive,) = folder.glob("kvkeeper-*.tgz")
    modules = folder / "node_modules"
    shutil.copytree(NODE_CLIENT / "node_modules", modules, symlinks=True, ignore=shutil.ignore_patterns("typescript", ".*"))
    (modules / "kvkeeper").mkdir()
    run("tar", "-xzf", archive, "-C", modules / "kvkeeper", "--strip-components=1", cwd=folder)
    (folder / "package.json").write_text('{"type": "module"}')
    return folder
