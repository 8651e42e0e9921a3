"""Writes the generated pages: `make docs`."""

from pathlib import Path

from docs.generate import PAGES

if __name__ == "__main__":
    for name, page in PAGES.items():
        Path(__file__).resolve().parents[1].joinpath(name).write_text(page())
        print(f"docs/{name}")
