"""`kvkeeper serve`: both services, and before them a gateway for the clients of OpenAI and Anthropic.

What `up` does, and one process more, which starts last and ends first. There is no HTTP server of our own.
"""

import argparse
import json
from functools import partial

from kvkeeper.cli.console.problems import EXIT_FAILED, complain
from kvkeeper.cli.console.tables import facts
from kvkeeper.cli.show.status import model_line
from kvkeeper.cli.start import gateway, up
from kvkeeper.cli.start.processes import ServiceProcess
from kvkeeper.cli.start.supervisor import Service
from kvkeeper.cli.start.together import Together
from kvkeeper.client import AsyncEngineClient
from kvkeeper.common.service.extras import install_command, missing

_GATEWAY = "gateway"
_HTTP = "127.0.0.1:8000"
_PROMPT = "def fibonacci(n):"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [flags]"
    parser.description = (
        "Runs both services and a gateway that speaks HTTP, until Ctrl-C; what dies is started again. MODEL is a"
        " Hugging Face folder, or smollm2, which is fetched once (default: the embedded demo model, a toy). Any flag of one of"
        " the three is written with its name in front: --cache-max-sequences 64, --engine-dtype int8,"
        " --gateway-prometheus-port 29001 (see kvkeeper cache --help, kvkeeper engine --help, smg launch --help)."
    )
    parser.add_argument("--http", metavar="ADDRESS", default=_HTTP, help="where clients find it (default: %(default)s)")
    up.add_service_flags(parser)


def run(args: argparse.Namespace) -> int:
    if missing(gateway.MODULE, "smg_grpc_proto"):
        text = f"the gateway is not installed; install it with: {install_command('gateway')}"
        complain(text, reason="NOT_STARTED", is_json=args.json)
        return EXIT_FAILED
    from kvkeeper.common.service.settings import METRICS_ADDRESS

    # Not by argparse, which would take the value of a service's flag for the model.
    has_model = args.other_flags and not args.other_flags[0].startswith("-")
    args.model = args.other_flags.pop(0) if has_model else None

    if not args.http or (refusal := METRICS_ADDRESS.refusal(args.http)):
        args.usage_error(f"--http: {refusal if args.http else 'host:port'}")
    flags = up.checked_flags(args, _GATEWAY)
    if isinstance(flags, int):
        return flags
    if args.engine_listen.startswith("unix:"):
        args.usage_error("--engine-listen: host:port, which the gateway can reach")
    flags["engine"] += ["--gateway", "on"]
    start = partial(ServiceProcess.start, _GATEWAY, gateway.flags(args.http, args.engine_listen, flags[_GATEWAY]))
    services = [*up.make_services(args, flags), Service(_GATEWAY, start, partial(gateway.until_serving, args.http))]
    together = Together(services, partial(_ready_text, args), is_json=args.json)
    return together.run("stopped; the gateway and both services have ended")


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
    rows = [("http", base), ("engine service", args.engine_listen), ("cache service", args.cache_listen),
            ("model", model_line(model)), ("curl", curl), ("openai", openai)]  # fmt: skip
    return f"ready\n{facts(rows, '  ')}"
