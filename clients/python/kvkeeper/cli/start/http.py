"""`kvkeeper http`: the engine service for clients that speak HTTP, as OpenAI's and Anthropic's do.

A process of its own, which holds nothing but its clients' connections: it may be killed and started again at any time.
"""

import argparse
import asyncio
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvkeeper.cli.console.addresses import add_engine_flag
from kvkeeper.cli.console.problems import EXIT_FAILED, EXIT_OK, complain
from kvkeeper.cli.start.processes import ServiceProcess
from kvkeeper.cli.start.services import PARENT_VARIABLE, end_with_parent
from kvkeeper.cli.start.supervisor import Service
from kvkeeper.common.service.extras import install_command, missing

if TYPE_CHECKING:
    from kvkeeper.http.responses import Form

NAME = "http"
MODULES = ("starlette", "uvicorn", "httptools", "pydantic")
LISTEN = "127.0.0.1:8000"
_POLL_S = 0.02
_ANSWER_S = 5.0
_ENGINE_VARIABLE, _FORM_VARIABLE = "KVKEEPER_ENGINE_LISTEN", "KVKEEPER_HTTP_RESPONSE_FORM"
_TEMPLATE_VARIABLE = "KVKEEPER_HTTP_RESPONSE_TEMPLATE"
_KEYS_VARIABLE = "KVKEEPER_HTTP_NEEDS_KEYS"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serves OpenAI's HTTP from an engine, until Ctrl-C. Clients show the engine their own keys, as bearer tokens; it has"
        " no key of its own."
    )
    parser.add_argument("--listen", metavar="ADDRESS", default=LISTEN, help="where clients find it (default: %(default)s)")
    parser.add_argument("--workers", metavar="NUM", type=int, default=1, help="processes that serve (default: %(default)s)")
    parser.add_argument(
        "--response-form", metavar="NAME", help="how the model writes thoughts and calls (default: as its chat template shows)"
    )
    parser.add_argument(
        "--response-template",
        metavar="FILE",
        type=Path,
        help="the same, as a response template of transformers, in JSON (default: the model's own, where no form is shown)",
    )
    parser.add_argument(
        "--https-cert", metavar="FILE", type=Path, help="certificate, in PEM: clients speak HTTPS, also from other hosts"
    )
    parser.add_argument("--https-key", metavar="FILE", type=Path, help="its key, which this user alone may read")
    parser.add_argument(
        "--trust-network",
        action="store_true",
        help="serve other hosts without TLS, and before an engine that asks for no keys: the network of a container or a pod"
        " decides who reaches the address",
    )
    add_engine_flag(parser, shows_token=False)


def refuse_tls(args: argparse.Namespace, typed: Sequence[str]) -> None:
    """Ends with a usage error where the front beside both services is to speak TLS: it is reached from this host alone."""
    if any(flag.startswith("--https") for flag in typed):
        args.usage_error("--http-https-cert: `kvkeeper http` by itself speaks TLS; this one is reached from this host alone")


def trusts_network(typed: Sequence[str]) -> bool:
    """Whether the flags of a command that starts both services let other hosts reach the front beside them."""
    return f"--{NAME}-trust-network" in typed


def service(listen: str, engine: str, typed: Sequence[str]) -> Service:
    """The front beside both services. engine: address of its engine; typed: flags of its own."""
    start = partial(ServiceProcess.start, NAME, ["--listen", listen, "--engine", engine, *typed])
    return Service(NAME, start, partial(until_serving, listen))


def refuse(
    args: argparse.Namespace,
    flag: str,
    listen: str,
    modules: Sequence[str] = MODULES,
    extra: str = NAME,
    *,
    is_open: bool = False,
) -> int | None:
    """The exit code where a front cannot listen there, which is reported; else None.

    modules: those that it needs, of this extra. is_open: other hosts may reach it.
    """
    from kvkeeper.common.service.listen import AddressInUse, check_free
    from kvkeeper.common.service.settings import LISTEN_ADDRESS, METRICS_ADDRESS

    form = LISTEN_ADDRESS if is_open and not listen.startswith("unix:") else METRICS_ADDRESS
    if wrong := form.refusal(listen) if listen else "host:port":
        args.usage_error(f"{flag}: {wrong}")
    text = f"{' and '.join(missing(*modules))}: not installed; install with: {install_command(extra)}"
    if not missing(*modules):
        try:
            check_free(listen)
            return None
        except AddressInUse as error:
            text = f"{flag} {listen}: {error}"
    complain(text, reason="NOT_STARTED", is_json=getattr(args, "json", False))
    return EXIT_FAILED


def run(args: argparse.Namespace) -> int:
    tls = None if args.https_cert is None else (args.https_cert, args.https_key)
    is_open = tls is not None or args.trust_network
    if (exit_code := refuse(args, "--listen", args.listen, is_open=is_open)) is not None:
        return exit_code
    if (exit_code := _refuse_files(args)) is not None:
        return exit_code
    from kvkeeper.common.service.settings import is_local

    if args.response_form is not None and args.response_template is not None:
        args.usage_error("--response-form and --response-template: one of them")
    try:
        _form(args.response_form, args.response_template)
    except (OSError, ValueError) as error:
        args.usage_error(f"{'--response-form' if args.response_template is None else '--response-template'}: {error}")
    if args.workers < 1:
        args.usage_error("--workers: 1 or more")
    if not end_with_parent():
        return EXIT_FAILED
    from kvkeeper.http.server import serve

    os.environ[_ENGINE_VARIABLE] = args.engine  # workers read it
    if args.response_form is not None:
        os.environ[_FORM_VARIABLE] = args.response_form
    if args.response_template is not None:
        os.environ[_TEMPLATE_VARIABLE] = str(args.response_template.absolute())
    if not is_local(args.listen) and not args.trust_network:
        os.environ[_KEYS_VARIABLE] = "1"
    if args.workers == 1:
        serve(make(), args.listen, tls=tls)
    else:
        os.environ[PARENT_VARIABLE] = str(os.getpid())
        serve(f"{__name__}:make", args.listen, num_workers=args.workers, tls=tls)
    return EXIT_OK


def _refuse_files(args: argparse.Namespace) -> int | None:
    """The exit code where certificate and key cannot be used, which is reported; else None."""
    if (args.https_cert is None) != (args.https_key is None):
        args.usage_error("--https-cert and --https-key: they go together")
    if args.https_cert is None:
        return None
    from kvkeeper.common.trust.private_file import FileRefused
    from kvkeeper.common.trust.tls import ServerTls

    try:
        ServerTls(args.https_cert, args.https_key, None)
        return None
    except FileRefused as error:
        complain(str(error), reason="NOT_STARTED", is_json=getattr(args, "json", False))
        return EXIT_FAILED


def make() -> Any:
    """The application of one process, for the engine that the environment names."""
    from kvkeeper.common.service import log
    from kvkeeper.http.app import make_app
    from kvkeeper.http.engines import Engines

    if not end_with_parent():
        sys.exit(EXIT_FAILED)
    log.configure("info", "http")
    needs_keys = _KEYS_VARIABLE in os.environ
    form = _form(os.environ.get(_FORM_VARIABLE), os.environ.get(_TEMPLATE_VARIABLE))
    return make_app(Engines(os.environ[_ENGINE_VARIABLE], form, needs_keys=needs_keys))


def _form(name: str | None, template: str | Path | None) -> "Form | None":
    """How the model writes, by name or by a file of a response template. Raises UnknownForm, WrongTemplate, OSError."""
    from kvkeeper.http.responses import choose_form, template_form

    if template is not None:
        return template_form(Path(template).read_text(encoding="utf-8"))
    return None if name is None else choose_form(None, name)


async def until_serving(listen: str, path: str = "/health") -> None:
    """Returns when this probe of a front or gateway succeeds; the caller limits the time."""
    while not await asyncio.to_thread(_is_ready, f"http://{listen}{path}"):  # noqa: ASYNC110  the event is in another process
        await asyncio.sleep(_POLL_S)


def _is_ready(probe: str) -> bool:
    try:
        with urllib.request.urlopen(probe, timeout=_ANSWER_S):
            return True
    except (urllib.error.URLError, OSError):
        return False
