"""`kvkeeper token`: a new token, printed once, and the entry of --auth-tokens that lets it in. It writes no file.

The token goes to stdout and the entry to stderr, so that a shell can put each where it belongs.
"""

import argparse
import json
import sys

from kvkeeper.cli.console.addresses import add_json_flag
from kvkeeper.common.trust.caller import ANY_TENANT, MAX_NAME_CHARS, Caller, Role
from kvkeeper.common.trust.credentials import make_entry, make_token


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints a new token on stdout, which nothing keeps, and on stderr the entry for the file of --auth-tokens,"
        " with its SHA-256. Give the token to the program that calls, in a file that only it may read (--token-file)."
    )
    parser.add_argument("--name", type=_name, required=True, help="of the caller, as the log shows it")
    parser.add_argument("--role", choices=[role.value for role in Role], required=True, help="what it may do")
    parser.add_argument(
        "--tenant", type=_tenant, default=ANY_TENANT, help="the tenant that it acts for, or * for all (default: %(default)s)"
    )
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    token = make_token()
    entry = make_entry(token, Caller(args.name, args.tenant, Role(args.role)))
    if args.json:
        print(json.dumps({"token": token, "entry": entry}))
    else:
        print(token)
        print(f"# for the file of --auth-tokens\n{entry}", file=sys.stderr, end="")
    return 0


def _name(text: str) -> str:
    if not 1 <= len(text) <= MAX_NAME_CHARS or not text.isprintable():
        raise argparse.ArgumentTypeError(f"1 to {MAX_NAME_CHARS} printable characters")
    return text


def _tenant(text: str) -> str:
    if len(text) > MAX_NAME_CHARS or not text.isprintable() or (ANY_TENANT in text and text != ANY_TENANT):
        raise argparse.ArgumentTypeError(f"at most {MAX_NAME_CHARS} printable characters, or * for all tenants")
    return text
