"""What `kvkeeper.client` offers: every name, each imported when it is asked for."""

import pytest

import kvkeeper.client


def test_every_name_is_there_and_no_other() -> None:
    found = {name: getattr(kvkeeper.client, name) for name in kvkeeper.client.__all__}
    assert set(kvkeeper.client._HOME_OF) == set(found) <= set(dir(kvkeeper.client))
    for name, value in found.items():
        assert value.__name__ == name
        assert value.__module__ == f"kvkeeper.client.{kvkeeper.client._HOME_OF[name]}"
    with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
        _ = kvkeeper.client.Nonsense
