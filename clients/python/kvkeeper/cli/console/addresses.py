"""Addresses of the services: flags over environment over defaults."""

import argparse
import os

from kvkeeper.client.targets import cache_address, engine_address

_CREDENTIALS = "has_credentials_flags"
_FLAGS = {
    "--token-file": "file with the token to show the services",
    "--tls-ca": "authority of the services' certificates in PEM, which switches TLS on",
    "--tls-cert": "certificate to show the services, in PEM",
    "--tls-key": "key of --tls-cert, in PEM",
}


def add_cache_flag(parser: argparse.ArgumentParser) -> None:
    _add_address(parser, "cache", cache_address())


def add_engine_flag(parser: argparse.ArgumentParser, *, shows_token: bool = True) -> None:
    """shows_token: the command has a token of its own."""
    _add_address(parser, "engine", engine_address(), shows_token=shows_token)


def _add_address(parser: argparse.ArgumentParser, service: str, default: str, *, shows_token: bool = True) -> None:
    text = f"{service} service, host:port or unix:/path (default: %(default)s)"
    parser.add_argument(f"--{service}", metavar="ADDRESS", default=default, help=text)
    parser.set_defaults(asks=service)  # where a call failed; a command that asks both says which
    add_credentials_flags(parser, shows_token=shows_token)


def add_credentials_flags(parser: argparse.ArgumentParser, *, shows_token: bool = True) -> None:
    """What the command shows the services; each flag stands for the variable of its name. Added once to a parser."""
    if parser.get_default(_CREDENTIALS) is not None:
        return
    parser.set_defaults(**{_CREDENTIALS: True})
    for flag, text in _FLAGS.items():
        if shows_token or flag != "--token-file":
            parser.add_argument(flag, metavar="FILE", help=f"{text} (or {_variable(flag)})")


def set_credentials(args: argparse.Namespace) -> None:
    """Flags over environment: the clients of this process, and of those that it starts, read the environment."""
    if hasattr(args, _CREDENTIALS):
        given = {flag: getattr(args, flag.removeprefix("--").replace("-", "_"), None) for flag in _FLAGS}
        os.environ.update({_variable(flag): value for flag, value in given.items() if value})


def _variable(flag: str) -> str:
    return "KVKEEPER_" + flag.removeprefix("--").replace("-", "_").upper()


def add_scope_flags(parser: argparse.ArgumentParser) -> None:
    """Flags for the adapter and the salt of a prompt, as clients of the cache service name them."""
    parser.add_argument("--adapter", default="", metavar="DIGEST", help="adapter of the prompt, 64 hex digits")
    parser.add_argument("--cache-salt", default="", metavar="TEXT", help="salt of the prompt")


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
