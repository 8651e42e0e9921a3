"""`kvkeeper serve`: both services, and before them a front for clients that speak HTTP: our own, or a gateway.

What `up` does, and one process more, which starts last and ends first.
"""

import argparse
import json
from functools import partial

from kvkeeper.cli.console.tables import facts
from kvkeeper.cli.show.status import model_line
from kvkeeper.cli.start import gateway, http, up
from kvkeeper.cli.start.processes import ServiceProcess
from kvkeeper.cli.start.supervisor import Service
from kvkeeper.cli.start.together import Together
from kvkeeper.client import AsyncEngineClient

_GATEWAY = "gateway"
_PROMPT = "def fibonacci(n):"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [flags]"
    parser.description = (
        "Runs both services and a front that speaks HTTP, until Ctrl-C. MODEL is a"
        " Hugging Face folder, or smollm2, which is fetched once (default: the embedded demo model, a toy). Any flag of one of"
        " the three is written with its name in front: --cache-max-sequences 64, --engine-dtype int8, --http-workers 2"
        " (see kvkeeper cache --help, kvkeeper engine --help, kvkeeper http --help). With --gateway, which is for fleets, the"
        " gateway smg speaks HTTP instead: --gateway-prometheus-port 29001 (see smg launch --help)."
    )
    parser.add_argument("--http", metavar="ADDRESS", default=http.LISTEN, help="where clients find it (default: %(default)s)")
    parser.add_argument("--gateway", action="store_true", help="start the gateway smg instead of the front of our own")
    up.add_service_flags(parser)


def run(args: argparse.Namespace) -> int:
    needed = ((gateway.MODULE, "smg_grpc_proto"), _GATEWAY) if args.gateway else (http.MODULES, http.NAME)
    is_open = http.trusts_network(args.other_flags)
    if (exit_code := http.refuse(args, "--http", args.http, *needed, is_open=is_open)) is not None:
        return exit_code
    # Not by argparse, which would take the value of a service's flag for the model.
    has_model = args.other_flags and not args.other_flags[0].startswith("-")
    args.model = args.other_flags.pop(0) if has_model else None

    flags = up.checked_flags(args, _GATEWAY if args.gateway else http.NAME)
    if isinstance(flags, int):
        return flags
    if not args.gateway:
        http.refuse_tls(args, flags[http.NAME])
    front = _gateway(args, flags) if args.gateway else http.service(args.http, args.engine_listen, flags[http.NAME])
    together = Together([*up.make_services(args, flags), front], partial(_ready_text, args), is_json=args.json)
    return together.run(f"stopped; the {front.name} and both services have ended")


def _gateway(args: argparse.Namespace, flags: dict[str, list[str]]) -> Service:
    if args.engine_listen.startswith("unix:"):
        args.usage_error("--engine-listen: host:port, which the gateway can reach")
    flags["engine"] += ["--gateway", "on"]
    start = partial(ServiceProcess.start, _GATEWAY, gateway.flags(args.http, args.engine_listen, flags[_GATEWAY]))
    return Service(_GATEWAY, start, partial(http.until_serving, args.http, gateway.PROBE))


async def _ready_text(args: argparse.Namespace) -> str:
    base = f"http://{args.http}/v1"
    async with AsyncEngineClient(args.engine_listen) as client:
        model = await client.model()
    name = model.model_id
    body = json.dumps({"model": name, "prompt": _PROMPT, "max_tokens": 40})
    curl = f"curl {base}/completions -H 'Content-Type: application/json' -d '{body}'"
    openai = f'OpenAI(base_url="{base}", api_key="none").completions.create(model="{name}", prompt="{_PROMPT}")'
    if args.json:
        return json.dumps({"ready": True, "http": base, "engine": args.engine_listen, "cache": args.cache_listen, "model": name,
                           "curl": curl, "openai": openai})  # fmt: skip
    rows = [("http", base), *([] if args.gateway else [("page", f"http://{args.http}/")]),
            ("engine service", args.engine_listen), ("cache service", args.cache_listen),
            ("model", model_line(model)), ("curl", curl), ("openai", openai)]  # fmt: skip
    return f"ready\n{facts(rows, '  ')}"
