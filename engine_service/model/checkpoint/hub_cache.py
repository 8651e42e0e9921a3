"""A hub's cache of one model, models--ORG--NAME: where its newest snapshot lies."""

from pathlib import Path

from .json_file import CONFIG_FILE

SNAPSHOTS = f"snapshots/*/{CONFIG_FILE}"  # in the cache of one model


def newest_snapshot(path: str) -> str:
    """The newest snapshot where the path is a hub's cache of one model, else the path as it is."""
    folder = Path(path)
    found = [] if (folder / CONFIG_FILE).exists() else [config.parent for config in folder.glob(SNAPSHOTS)]
    return str(max(found, key=lambda snapshot: snapshot.stat().st_mtime_ns, default=path))
