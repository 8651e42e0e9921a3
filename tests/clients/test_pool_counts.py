"""`kvkeeper stats` shows every count of a pool."""

from google.protobuf.descriptor import FieldDescriptor

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cli.show.pool_counts import show_pool
from kvkeeper.common.service.sizes import size

SHARES = {
    "slot_utilization": 0.111,
    "hit_rate": 0.222,
    "block_utilization": 0.333,
    "recent_hit_rate": 0.444,
    "reachable_hit_rate": 0.555,
}


def test_every_count_has_its_place() -> None:
    info = pb.PoolInfo(num_host_blocks=9, num_disk_blocks=9, has_remote=True)
    pool = pb.PoolStats(pressure=pb.PRESSURE_LEVEL_HIGH, pool=info, **SHARES)
    pool.groups.add(window_tokens=4001, num_held_entries=4002, num_passed_entries=4003)
    shown_as = {name: f"{share:.1%}" for name, share in SHARES.items()} | {"pressure": "high", "pool": "pool: "}
    pool.disk_first_byte_seconds, pool.remote_first_byte_seconds = 0.0301, 0.0302
    shown_as |= {"disk_first_byte_seconds": "30.1", "remote_first_byte_seconds": "30.2"}
    shown_as |= {"misses": "", "curve": ""}  # they have commands of their own
    shown_as["groups"] = "window of 4,001 tokens  4,002, 4,003"
    for field in pool.DESCRIPTOR.fields:
        if field.name not in shown_as:
            assert field.type in (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64), field.name
            setattr(pool, field.name, 5000 + field.number)
            shown_as[field.name] = size(5000 + field.number) if "bytes" in field.name else f"{5000 + field.number:,}"
    text = show_pool(pool)
    assert {name for name, shown in shown_as.items() if shown not in text} == set()


def test_a_pool_without_lower_tiers_says_nothing_of_them() -> None:
    text = show_pool(pb.PoolStats(pressure=pb.PRESSURE_LEVEL_LOW))
    assert "host" not in text and "disk" not in text and "remote" not in text


def test_a_group_says_which_heads_of_its_own_it_has() -> None:
    groups = [pb.LayerGroup(num_kv_heads=4, head_dim=512), pb.LayerGroup(kind=pb.LAYER_GROUP_KIND_SLIDING_WINDOW)]
    pool = pb.PoolStats(pool=pb.PoolInfo(spec=pb.KvSpec(groups=groups)))
    pool.groups.add(num_held_entries=9)
    pool.groups.add(window_tokens=1024, num_held_entries=3, num_passed_entries=6)
    shown = " ".join(show_pool(pool).split())
    assert "all tokens, 4 KV heads of 512 9, 0 window of 1,024 tokens 3, 6" in shown


def test_a_group_of_states_says_which_are_kept() -> None:
    spec = pb.KvSpec(groups=[pb.LayerGroup(), pb.LayerGroup(kind=pb.LAYER_GROUP_KIND_RECURRENT, checkpoint_blocks=4)])
    pool = pb.PoolStats(pool=pb.PoolInfo(spec=spec))
    pool.groups.add(num_held_entries=9)
    pool.groups.add(window_tokens=2, num_held_entries=3, num_passed_entries=6)
    assert "states, one kept of 4  3, 6" in " ".join(show_pool(pool).split("\n")).replace("   ", "  ")
