"""A connection is not several clients by naming several tenants; callers over a Unix socket are told apart by them alone."""

from kvkeeper.engine_service.rpc.admission import get_client, get_connection
from tests.support.worlds.scheduler_world import make_request


def test_a_connection_is_one_client_whatever_tenants_it_names() -> None:
    assert get_client("ipv4:127.0.0.1:5", "a") == get_client("ipv4:127.0.0.1:5", "b") == get_client("ipv4:127.0.0.1:5", "")
    assert get_client("ipv4:127.0.0.1:5", "a") != get_client("ipv4:127.0.0.1:6", "a")


def test_callers_over_a_unix_socket_are_told_apart_by_their_tenants() -> None:
    assert len({get_client("unix:", "a"), get_client("unix:", "b"), get_client("unix:", "")}) == 3


def test_starts_go_by_connections_and_tenants_of_a_unix_socket_are_left_to_fair_shares() -> None:
    for peer, tenant, connection in (
        ("ipv4:127.0.0.1:4711", "", "ipv4:127.0.0.1:4711"),
        ("ipv4:127.0.0.1:4711", "a", "ipv4:127.0.0.1:4711"),
        ("unix:", "", ""),
        ("unix:", "a", ""),
    ):
        request = make_request([1], 1, client=get_client(peer, tenant))
        request.tenant = tenant
        assert get_connection(request) == connection
