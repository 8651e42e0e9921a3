"""The file of tokens: what it says, what is refused of it, and that nothing of it gets into an error."""

import hashlib
import os
import stat
from pathlib import Path

import pytest
import structlog

from kvkeeper.client.credentials import Credentials as Shown
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.common.trust.caller import LOCAL, Caller, Role, calling, calling_tenant, note_caller, require_all_tenants
from kvkeeper.common.trust.credentials import Credentials, KnownCallers, make_entry, make_token, read_credentials
from kvkeeper.common.trust.private_file import FileRefused, mode_refusal

ENGINE = Caller("engine-1", "*", Role.ENGINE)
READER = Caller('dash\\board "1"', "acme", Role.READER)
HASH = hashlib.sha256(b"secret").hexdigest()
GOOD = f'[[token]]\nname = "a"\nsha256 = "{HASH}"\ntenant = "acme"\nrole = "client"\n'


def written(path: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


def test_what_the_command_prints_is_what_the_file_takes(tmp_path: Path) -> None:
    tokens = {make_token(): caller for caller in (ENGINE, READER)}
    known = read_credentials(written(tmp_path / "t", "\n".join(make_entry(*entry) for entry in tokens.items())))
    assert [known.by_token(token) for token in tokens] == [ENGINE, READER]
    assert len(set(tokens)) == 2 and all(len(token) == 47 for token in tokens)


def test_neither_the_file_nor_the_process_keeps_a_token(tmp_path: Path) -> None:
    token = make_token()
    path = written(tmp_path / "t", make_entry(token, ENGINE))
    known = read_credentials(path)
    digest = hashlib.sha256(token.encode()).digest()
    assert token not in path.read_text() and digest.hex() in path.read_text()
    assert all(digest != held and token.encode() not in held for held in known.tokens)


@pytest.mark.parametrize(
    ("names", "caller"),
    [(["a"], ENGINE), (["b"], READER), (["x", "a"], ENGINE), (["a", "b"], None), ([], None), (["A"], None)],
)
def test_a_certificate_stands_for_one_caller_or_none(names: list[str], caller: Caller | None) -> None:
    assert Credentials({}, {"a": ENGINE, "b": READER}).by_certificate(names) == caller


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD.replace(HASH, HASH[:-1]), "number 1: sha256 is 64 digits"),
        (GOOD.replace(HASH, HASH.upper()), "number 1: sha256 is 64 digits"),
        (GOOD + GOOD, "number 2: its sha256 stands above already"),
        (GOOD.replace('"client"', '"root"'), "number 1: role is one of engine, client, reader, operator"),
        (GOOD.replace('tenant = "acme"\n', ""), "number 1: needs name, role, sha256, tenant"),
        (GOOD.replace('"acme"', "7"), "number 1: needs name, role, sha256, tenant"),
        (GOOD + "more = 1\n", "number 1: needs name, role, sha256, tenant"),
        (GOOD.replace('"acme"', '"a*"'), "number 1: tenant is at most 64"),
        (GOOD.replace('"acme"', f'"{"t" * 65}"'), "number 1: tenant is at most 64"),
        (GOOD.replace('name = "a"', 'name = ""'), "number 1: name is 1 to 64"),
        (GOOD.replace('name = "a"', 'name = "\\u0007"'), "number 1: name is 1 to 64"),
        (GOOD.replace("[[token]]", "[token]"), r"write \[\[token\]\] in double brackets"),
        (GOOD + "[[tokens]]\n", "1 keys beside the tables"),
        (GOOD[:-2], "is not TOML"),
        ("", r"has no \[\[token\]\] and no \[\[certificate\]\]"),
        ("# nothing yet\n", r"has no \[\[token\]\] and no \[\[certificate\]\]"),
        ("token = []\n", r"has no \[\[token\]\] and no \[\[certificate\]\]"),
        (b"\xff", "is not UTF-8"),
        (" " * ((1 << 20) + 1), "more than 1 MiB"),
    ],
)
def test_a_wrong_file_is_refused_and_nothing_of_it_is_told(tmp_path: Path, text: str | bytes, said: str) -> None:
    with pytest.raises(FileRefused, match=said) as refused:
        read_credentials(written(tmp_path / "t", text))
    assert HASH[:-1] not in str(refused.value) and "acme" not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602, 0o610, 0o777, 0o700, 0o644])
def test_a_file_that_others_can_get_at_is_refused_with_the_mend(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path / "t", GOOD, mode)
    with pytest.raises(FileRefused, match=f"mode {mode:04o}, .*: chmod 600 "):
        read_credentials(path)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_private_file_is_read(tmp_path: Path, mode: int) -> None:
    assert len(read_credentials(written(tmp_path / "t", GOOD, mode)).tokens) == 1


@pytest.mark.parametrize(
    ("owner", "user", "mode", "said"),
    [
        (1000, 1000, 0o600, None),
        (1000, 1000, 0o640, "chmod 600"),
        (0, 1000, 0o440, None),  # as Kubernetes mounts a secret
        (0, 1000, 0o444, "chmod 600"),
        (0, 1000, 0o460, "chmod 600"),
        (0, 0, 0o440, "chmod 600"),
        (1001, 1000, 0o600, "chown 1000"),
    ],
)
def test_who_may_own_the_file(owner: int, user: int, mode: int, said: str | None) -> None:
    status = os.stat_result((stat.S_IFREG | mode, 1, 1, 1, owner, 0, 1, 0, 0, 0))
    refusal = mode_refusal(Path("/t"), status, user)
    assert refusal is None if said is None else said in str(refusal)


def test_no_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileRefused, match="No such file"):
        read_credentials(tmp_path / "none")
    with pytest.raises(FileRefused, match="Is a directory"):
        read_credentials(tmp_path)


def test_a_token_that_is_taken_out_is_refused_a_second_later(tmp_path: Path) -> None:
    now = [0.0]
    tokens = [make_token(), make_token()]
    path = written(tmp_path / "t", make_entry(tokens[0], ENGINE))
    known = KnownCallers(path, lambda: now[0])
    written(path, make_entry(tokens[1], READER))
    assert known.now().by_token(tokens[0]) == ENGINE
    now[0] = 1.0
    assert [known.now().by_token(token) for token in tokens] == [None, READER]


@pytest.mark.parametrize("wrong", ["mode", "text", "gone", "empty"])
def test_a_file_that_goes_wrong_changes_nothing_and_one_that_is_mended_counts(tmp_path: Path, wrong: str) -> None:
    now = [0.0]
    tokens = [make_token(), make_token()]
    path = written(tmp_path / "t", make_entry(tokens[0], ENGINE))
    known = KnownCallers(path, lambda: now[0])
    if wrong == "gone":
        path.unlink()
    elif wrong == "empty":
        written(path, "")
    else:
        written(path, make_entry(tokens[1], READER) + ("" if wrong == "mode" else "["), 0o644 if wrong == "mode" else 0o600)
    now[0] += 1
    with structlog.testing.capture_logs() as logs:
        assert [known.now().by_token(token) for token in tokens] == [ENGINE, None]
    assert [(line["event"], line["log_level"]) for line in logs] == [("credentials_not_reloaded", "warning")]
    written(path, make_entry(tokens[1], READER))
    now[0] += 1
    assert [known.now().by_token(token) for token in tokens] == [None, READER]


@pytest.mark.parametrize("wrong", ["", "two words", None])
def test_a_client_shows_its_token_of_before_while_the_file_is_written(wrong: str | None, tmp_path: Path) -> None:
    tokens = [make_token(), make_token()]
    path = written(tmp_path / "t", tokens[0])
    shown = Shown(token_file=path)
    assert shown.metadata() == (("authorization", f"Bearer {tokens[0]}"),)
    path.unlink() if wrong is None else written(path, wrong)
    assert shown.metadata() == (("authorization", f"Bearer {tokens[0]}"),)
    with pytest.raises(KvkeeperError, match="the token file"):
        Shown(token_file=path).metadata()
    written(path, tokens[1])
    assert shown.metadata() == (("authorization", f"Bearer {tokens[1]}"),)


def refused(text: str, **metadata: str) -> PermissionError:
    return PermissionError(text, metadata)


@pytest.mark.parametrize(("named", "tenant"), [("", "acme"), ("acme", "acme"), ("other", None), ("*", None), ("ACME", None)])
def test_a_caller_of_one_tenant_names_that_or_none(named: str, tenant: str | None) -> None:
    counted = []
    note_caller(READER, lambda: counted.append(1))
    try:
        assert calling() == READER
        if tenant is None:
            with pytest.raises(PermissionError):
                calling_tenant(refused, named)
        else:
            assert calling_tenant(refused, named) == tenant
        with pytest.raises(PermissionError):
            require_all_tenants(refused)
        assert len(counted) == 1 + (tenant is None)
        assert [READER.owns(name) for name in ("acme", "", "other")] == [True, False, False]
    finally:
        note_caller(LOCAL)


def test_a_caller_of_all_tenants_names_any() -> None:
    note_caller(ENGINE)
    try:
        assert [calling_tenant(refused, name) for name in ("", "acme", "*")] == ["", "acme", "*"]
        require_all_tenants(refused)
    finally:
        note_caller(LOCAL)
