"""Addresses of the services: flags over environment over defaults."""

import argparse
import os

from kvkeeper.client import targets


def cache_address() -> str:
    return os.environ.get("KVKEEPER_CACHE_LISTEN") or targets.CACHE


def engine_address() -> str:
    return os.environ.get("KVKEEPER_ENGINE_LISTEN") or targets.ENGINE


def add_cache_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache",
        metavar="ADDRESS",
        default=cache_address(),
        help="cache service, host:port or unix:/path (default: %(default)s)",
    )


def add_engine_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        metavar="ADDRESS",
        default=engine_address(),
        help="engine service, host:port or unix:/path (default: %(default)s)",
    )


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
