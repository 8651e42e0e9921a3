"""`kvkeeper misses` and `kvkeeper curve`: why tokens were not found, and what pools of other sizes would hit."""

import json
from pathlib import Path

import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cli.show import curve, each_pool, misses

SPEC = pb.KvSpec(model_id="model", num_layers=1, num_kv_heads=1, head_dim=4, block_size=4)
POOL = pb.PoolStats(
    pool=pb.PoolInfo(num_blocks=11, num_host_blocks=21, block_bytes=1024, spec=SPEC),
    num_look_up_tokens=1000,
    num_hit_tokens=310,
    hit_rate=0.31,
    recent_hit_rate=0.3,
    reachable_hit_rate=0.62,
    misses=[
        pb.Miss(tenant="a", cause=pb.MATCH_END_NEVER_STORED, num_tokens=540),
        pb.Miss(tenant="a", cause=pb.MATCH_END_EVICTED, need=pb.EVICTION_NEED_OTHER, evicted_for="b", num_tokens=60),
        pb.Miss(
            tenant="a",
            cause=pb.MATCH_END_EVICTED,
            need=pb.EVICTION_NEED_OTHER,
            evicted_for="b",
            within_turnovers=0.25,
            num_tokens=30,
        ),
        pb.Miss(tenant="*", cause=pb.MATCH_END_EVICTED, need=pb.EVICTION_NEED_OWN, evicted_for="*", num_tokens=60),
    ],
    curve=[pb.CurvePoint(size=size, hit_rate=rate) for size, rate in ((0.25, 0.1), (1, 0.28), (2, 0.44), (8, 0.6))],
)


def test_misses_are_a_table_and_a_plain_sentence() -> None:
    text = misses.show_misses(POOL)
    cells = [line.split("  ") for line in text.splitlines()]
    found = [[cell.strip() for cell in line if cell.strip()] for line in cells]
    assert ["evicted", "tenant b", "up to 0.25", "a", "30", "3.0%"] in found
    assert ["evicted", "the same tenant", "more", "(others)", "60", "6.0%"] in found
    assert ["never there, or long forgotten", "-", "-", "a", "540", "54.0%"] in found
    assert text.endswith(
        "Your hit rate is 31.0% of 1,000 tokens, and of the last hour 30.0%. In that hour a pool that keeps what was used last"
        " would have had 28.0%, and 44.0% with 2 times the size. 9.0% of all tokens had been evicted for tenant b."
    )


def test_every_cause_has_words() -> None:
    ends = set(pb.MatchEnd.values()) - {pb.MATCH_END_UNSPECIFIED, pb.MATCH_END_COMPLETE, pb.MATCH_END_CACHING_OFF}
    assert misses.WORDS.keys() == ends


def test_a_pool_that_missed_nothing_says_so() -> None:
    assert "nothing was missed yet" in misses.show_misses(pb.PoolStats(pool=pb.PoolInfo(num_blocks=11, spec=SPEC)))


def test_the_curve_is_bars_with_what_was_measured_and_what_is_endless() -> None:
    lines = curve.show_curve(POOL).splitlines()
    assert [line.split() for line in lines[2:4]] == [["0.25", "x", "7", "10.0%", "#####"], ["1", "x", "30", "28.0%", 14 * "#"]]
    assert lines[-2].split() == ["measured", "30", "30.0%", 15 * "#"]
    assert lines[-1].split() == ["endless", "62.0%", 31 * "#"]


def test_the_curve_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Client:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> "Client":
            return self

        def __exit__(self, *_: object) -> None: ...
        def stats(self) -> pb.GetStatsResponse:
            return pb.GetStatsResponse(pools=[POOL])

    monkeypatch.setattr(each_pool, "CacheClient", Client)
    from kvkeeper.cli.commands import run

    picture = tmp_path / "curve.png"
    assert run(["curve", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert run(["curve", "--plot", str(tmp_path / "no" / "curve.png")]) == 2
    assert "cannot be written: No such file" in capsys.readouterr().err
    monkeypatch.setattr(curve, "missing", lambda *_: ["matplotlib"])
    assert run(["curve", "--plot", str(picture)]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err
    assert run(["curve", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["curve"][1] == {"size": 1.0, "hit_rate": 0.28}
    assert run(["misses", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["misses"][1]["evicted_for"] == "b"
