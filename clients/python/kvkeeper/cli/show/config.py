"""`kvkeeper config show`: the settings of both services as they would apply here, and where each stands."""

import argparse
import importlib
import json
import os

from kvkeeper.cli.console.addresses import add_json_flag
from kvkeeper.cli.console.problems import EXIT_FAILED, EXIT_OK, EXIT_USAGE, complain
from kvkeeper.cli.console.tables import table

_SERVICES = ("cache", "engine")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("show",), help="what to do")
    parser.add_argument("service", nargs="?", choices=_SERVICES, help="one service only")
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings, as given to the services")
    parser.add_argument("--set", action="store_true", help="leave out what is at its default")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from kvkeeper.common.service.settings import ConfigError

    found: dict[str, list[dict[str, str]]] = {}
    for service in _SERVICES if args.service is None else (args.service,):
        try:
            source = importlib.import_module(f"kvkeeper.{service}_service.config").SOURCE
            origins = source.origins(["--config", args.config] if args.config else [], os.environ)
        except ImportError as error:
            complain(f"the {service} service is not installed: {error}", reason="NOT_INSTALLED", is_json=args.json)
            return EXIT_FAILED
        except ConfigError as error:
            complain(str(error), reason="USAGE", is_json=args.json)
            return EXIT_USAGE
        found[service] = [
            {"setting": each.setting.flag.removeprefix("--"), "value": each.text, "from": each.place or "default"}
            for each in origins
            if each.place or not args.set
        ]
    if args.json:
        print(json.dumps(found))
        return EXIT_OK
    for service, rows in found.items():
        print(f"[{service}]")
        print(table(("setting", "value", "from"), [tuple(row.values()) for row in rows]) if rows else "all at its defaults")
    return EXIT_OK
