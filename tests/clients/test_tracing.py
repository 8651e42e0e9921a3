"""Traces that leave the processes: three programs, one collector; and programs without the packages for it."""

import os
import subprocess
import sys

import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.config import CacheConfig
from kvkeeper.client import AsyncCacheClient, CallOptions, StepItems
from kvkeeper.common import tracing
from kvkeeper.common.service.extras import install_command
from kvkeeper.common.service.settings import ConfigError
from tests.clients.test_cli import kvkeeper
from tests.support.processes.services import services_up, short_folder, sockets_in
from tests.support.processes.traces import Spans, collecting
from tests.support.stand_ins.fake_cache import FakeCache, Fault, serving

pytestmark = pytest.mark.in_turn

PROMPT = "secret_function(1)"


async def test_a_trace_goes_through_three_processes() -> None:
    with collecting() as collector, short_folder() as folder:
        cache, engine = sockets_in(folder)
        flags = ("--cache-trace-endpoint", collector.url, "--engine-trace-endpoint", collector.url)
        with services_up(folder, cache, engine, *flags):
            options = ("--max-tokens", "4", "--tenant", "acme-tenant", "--metadata", "who=secret-ada", "--session-id", "talk")
            done = await kvkeeper("generate", PROMPT, "--engine", engine, "--trace-endpoint", collector.url, *options)
            assert done.exit_code == 0, done.err
    by_name = {span.name: span for span in collector.spans}
    path = [
        by_name["text_completion"],
        by_name["kvkeeper.engine.v1.EngineService/Generate"],
        by_name["text_completion demo_model"],
        by_name["step"],
        by_name["kvkeeper.cache.v1.CacheService/Step"],
    ]
    services = ["kvkeeper-client", "kvkeeper-engine", "kvkeeper-engine", "kvkeeper-engine", "kvkeeper-cache"]
    assert [span.service for span in path] == services
    assert len({span.trace_id for span in path}) == 1
    assert [span.parent_id for span in path[1:]] == [span.span_id for span in path[:-1]]
    assert "talk" in collector.text
    for hidden in ("secret_function", "secret-ada", "acme-tenant", str(folder)):
        assert hidden not in collector.text


async def test_a_collector_that_does_not_answer_stops_nothing() -> None:
    nowhere = "http://127.0.0.1:1/v1/traces"
    with short_folder() as folder:
        cache, engine = sockets_in(folder)
        with services_up(folder, cache, engine, "--engine-trace-endpoint", nowhere) as running:
            done = await kvkeeper("generate", "def f():", "--max-tokens", "2", "--engine", engine, "--trace-endpoint", nowhere)
            assert done.exit_code == 0
            assert "kvkeeper: trace: " in done.err
        assert running.process.returncode == 143
        lines = running.log_path.read_text().splitlines()
        assert all(line.startswith(("{", "kvkeeper: ")) for line in lines), "told as lines of the service's log"


def without_opentelemetry(code: str) -> "subprocess.CompletedProcess[str]":
    blocked = f"import sys; sys.modules['opentelemetry'] = None\n{code}"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-c", blocked], env=env, capture_output=True, text=True, timeout=60)


def test_nothing_is_needed_without_tracing() -> None:
    done = without_opentelemetry(
        "import kvkeeper.cli.commands, kvkeeper.client, kvkeeper.cache_service.server, kvkeeper.common.tracing as tracing\n"
        "print(tracing.tracer(), tracing.outgoing(), tracing.serving('a/b', ()).__enter__())"
    )
    assert done.stdout == "None None None\n", done.stderr


@pytest.mark.parametrize("argv", [["cache"], ["generate", "x"]], ids=lambda argv: argv[0])
def test_what_is_missing_is_one_line(argv: list[str]) -> None:
    argv = [*argv, "--trace-endpoint", "http://127.0.0.1:1/v1/traces"]
    done = without_opentelemetry(f"import kvkeeper.cli; sys.exit(kvkeeper.cli.main({argv!r}))")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert "--trace-endpoint: " in line
    assert line.endswith(install_command("tracing"))


def test_without_a_provider_there_is_no_tracer() -> None:
    assert "opentelemetry.trace" in sys.modules
    assert tracing.tracer() is None
    assert tracing.outgoing() is None


def test_without_tracing_no_time_is_spent_on_looking_for_it() -> None:
    code = "import sys, kvkeeper.client, kvkeeper.cli.commands; print('opentelemetry' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize(
    "url", ["127.0.0.1:4318", "ftp://x/", "http://", "http://a b/", "http://user:pw@host/", "http://h/?q=1"]
)
def test_endpoints_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="--trace-endpoint"):
        CacheConfig(trace_endpoint=url)
    assert CacheConfig(trace_endpoint="https://collector.example:4318/v1/traces").trace_endpoint


async def test_a_traced_step_is_repeated_with_the_same_bytes() -> None:
    span = Spans().tracer().start_span("step")
    async with serving(FakeCache()) as fake, AsyncCacheClient(fake.target, CallOptions(first_pause_s=0.01)) as client:
        fake.script["OpenSession"] = [pb.OpenSessionResponse(session_id="s" * 32, epoch=1)]
        fake.script["StreamSteps"] = [Fault.HANG_UP, pb.StepResponse(step_id=1)]
        session = await client.open_session(pb.KvSpec())
        await session.step(StepItems(release_ids=np.array([1])), traceparent=tracing.make_traceparent(span))
        first, again = fake.requests["StreamSteps"]
    assert first == again
    context = span.get_span_context()
    wanted = f"00-{context.trace_id:032x}-{context.span_id:016x}-"
    assert pb.StepRequest.FromString(first).traceparent.startswith(wanted)
