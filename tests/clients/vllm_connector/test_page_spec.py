"""The KV spec of a vLLM worker: equal where pages may be shared, another where a fact differs; and the connector's settings."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvkeeper.cache_service.rpc.convert.kv_spec import kv_spec
from kvkeeper.vllm.page_spec import Facts, Part, find_revision, make_spec, page_offsets
from kvkeeper.vllm.settings import Settings, WrongSettings, parse_settings

PART = Part("layers.0", "torch.bfloat16", (2, 4, 8), 128)
FACTS = Facts(
    model="somewhere/tiny",
    revision="1",
    config="{}",
    dtype="torch.bfloat16",
    cache_dtype="auto",
    backend="CPU_ATTN",
    block_size=4,
    vllm_version="1.2.3",
    ranks={"tp": (0, 2), "pp": (0, 1)},
    parts=[PART, replace(PART, name="layers.1", num_bytes=120)],
)


def test_the_service_takes_the_spec_and_a_page_has_all_parts() -> None:
    spec = make_spec(FACTS)
    taken = kv_spec(spec)
    assert (taken.block_bytes, taken.block_size, taken.is_opaque) == (256, 4, True)
    assert spec.model_id == "vllm tiny", "the name of the model, and not where it lies"
    assert "somewhere" not in str(spec)
    assert page_offsets(FACTS.parts) == ([0, 128], 256)
    assert make_spec(replace(FACTS, ranks=dict(FACTS.ranks), parts=list(FACTS.parts))) == spec


@pytest.mark.parametrize(
    "other",
    [
        {"model": "somewhere/other"},
        {"model": "elsewhere/tiny"},
        {"revision": "2"},
        {"config": '{"rope_theta": 2}'},
        {"dtype": "torch.float16"},
        {"cache_dtype": "fp8"},
        {"backend": "OTHER"},
        {"block_size": 8},
        {"vllm_version": "1.2.4"},
        {"ranks": {"tp": (1, 2), "pp": (0, 1)}},
        {"ranks": {"tp": (0, 4), "pp": (0, 1)}},
        {"parts": [PART]},
        {"parts": [replace(PART, shape=(4, 2, 8)), FACTS.parts[1]]},
        {"parts": [replace(PART, dtype="torch.uint8"), FACTS.parts[1]]},
    ],
    ids=str,
)
def test_one_fact_more_or_less_is_another_pool(other: dict[str, Any]) -> None:
    assert kv_spec(make_spec(replace(FACTS, **other))).key != kv_spec(make_spec(FACTS)).key


def test_a_folder_of_weights_is_known_by_its_files(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    first = find_revision(str(tmp_path), None, "")
    assert find_revision(str(tmp_path), None, "") == first
    time_ns = weights.stat().st_mtime_ns
    weights.write_bytes(b"another")
    os.utime(weights, ns=(time_ns, time_ns))
    assert find_revision(str(tmp_path), None, "") != first, "another size"
    weights.write_bytes(b"two")
    os.utime(weights, ns=(time_ns, time_ns + 1))
    assert find_revision(str(tmp_path), None, "") != first, "another time"
    (tmp_path / "more").write_bytes(b"")
    assert len({first, find_revision(str(tmp_path), None, "")}) == 2


def test_what_the_user_tells_comes_first_and_a_name_alone_is_refused() -> None:
    assert find_revision("org/name", "abc", "mine") == "mine"
    assert find_revision("org/name", "abc", "") == "abc"
    with pytest.raises(WrongSettings, match="revision"):
        find_revision("org/name", None, "")


def test_settings_are_checked_once() -> None:
    assert parse_settings({}, "recompute") == Settings()
    made = parse_settings({"address": "unix:/x", "lookup_timeout_s": 1, "store_generated": False}, "recompute")
    assert (made.address, made.lookup_timeout_s, made.store_generated) == ("unix:/x", 1, False)


@pytest.mark.parametrize(
    ("extra", "policy", "said"),
    [
        ({"adress": "x"}, "recompute", "'adress'; known are address"),
        ({"lookup_timeout_s": "1"}, "recompute", "lookup_timeout_s cannot be '1'"),
        ({"lookup_timeout_s": True}, "recompute", "lookup_timeout_s cannot be True"),
        ({"call_timeout_s": 0}, "recompute", "call_timeout_s cannot be 0"),
        ({"store_generated": 1}, "recompute", "store_generated cannot be 1"),
        ({"lease_s": 61}, "recompute", "lease_s is 0.5 to 60"),
        ({}, "fail", '"kv_load_failure_policy": "recompute"'),
    ],
)
def test_wrong_settings_are_named(extra: dict[str, object], policy: str, said: str) -> None:
    with pytest.raises(WrongSettings, match=said):
        parse_settings(extra, policy)
