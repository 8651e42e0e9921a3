"""A connection is not several clients by naming several tenants; callers over a Unix socket are told apart by them alone."""

from kvkeeper.engine_service.rpc.admission import client_of, connection_of
from tests.support.worlds.scheduler_world import make_request


def test_a_connection_is_one_client_whatever_tenants_it_names() -> None:
    assert client_of("ipv4:127.0.0.1:5", "a") == client_of("ipv4:127.0.0.1:5", "b") == client_of("ipv4:127.0.0.1:5", "")
    assert client_of("ipv4:127.0.0.1:5", "a") != client_of("ipv4:127.0.0.1:6", "a")


def test_callers_over_a_unix_socket_are_told_apart_by_their_tenants() -> None:
    assert len({client_of("unix:", "a"), client_of("unix:", "b"), client_of("unix:", "")}) == 3


def test_starts_go_by_connections_and_tenants_of_a_unix_socket_are_left_to_fair_shares() -> None:
    for peer, tenant, connection in (
        ("ipv4:127.0.0.1:4711", "", "ipv4:127.0.0.1:4711"),
        ("ipv4:127.0.0.1:4711", "a", "ipv4:127.0.0.1:4711"),
        ("unix:", "", ""),
        ("unix:", "a", ""),
    ):
        request = make_request([1], 1, client=client_of(peer, tenant))
        request.tenant = tenant
        assert connection_of(request) == connection
