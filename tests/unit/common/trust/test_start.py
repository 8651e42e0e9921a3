"""An unsafe configuration does not start: every combination of address, TLS, tokens and authority, of both services."""

import itertools
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from kvkeeper.cache_service.__main__ import main as cache_main
from kvkeeper.cache_service.config import SOURCE as CACHE
from kvkeeper.cache_service.memory.private_file import private_directory
from kvkeeper.common.service.listen import AddressInUse, SocketLock
from kvkeeper.common.service.process import StartError
from kvkeeper.common.service.settings import ConfigError
from kvkeeper.common.trust.caller import Caller, Role
from kvkeeper.common.trust.guard import Guard
from kvkeeper.engine_service.config import SOURCE as ENGINE
from tests.support.trust.certificates import SERVER_NAMES, authority, issue
from tests.support.trust.guarded_server import Config, TokenFile

LOCAL = ("127.0.0.1:7410", "127.9.9.9:7410", "localhost:7410", "[::1]:7410", "unix:/run/kvkeeper.sock")
OPEN = ("0.0.0.0:7410", "[::]:7410", "10.0.0.7:7410", "[2001:db8::1]:7410", "192.168.1.1:0", "[::ffff:10.0.0.7]:7410")
FLAGS = ("--tls-cert", "--tls-key", "--tls-client-ca", "--auth-tokens")
COMBINATIONS = [
    (address, given) for address in LOCAL + OPEN for count in range(5) for given in itertools.combinations(FLAGS, count)
]


def is_safe(address: str, given: tuple[str, ...]) -> bool:
    """By the rule, written anew."""
    has_tls = "--tls-cert" in given
    if has_tls != ("--tls-key" in given) or ("--tls-client-ca" in given and not has_tls):
        return False
    if address.startswith("unix:"):
        return not has_tls
    return address in LOCAL or (has_tls and bool({"--tls-client-ca", "--auth-tokens"} & set(given)))


@pytest.mark.parametrize("source", [CACHE, ENGINE], ids=["cache", "engine"])
def test_every_combination_starts_or_is_refused_in_one_sentence(source: Any) -> None:
    num_safe = 0
    for address, given in COMBINATIONS:
        argv = ["--listen", address, *(word for flag in given for word in (flag, "/file"))]
        if is_safe(address, given):
            source.load(argv, {})
            num_safe += 1
            continue
        with pytest.raises(ConfigError) as refused:
            source.load(argv, {})
        assert str(refused.value).startswith(("--listen: ", "--tls-")) and "\n" not in str(refused.value), (address, given)
    assert 0 < num_safe < len(COMBINATIONS) == (len(LOCAL) + len(OPEN)) * 16


@pytest.mark.parametrize("source", [CACHE, ENGINE], ids=["cache", "engine"])
@pytest.mark.parametrize("address", ["example.net:7410", "0:1", "host", "1.2.3.4:99999", ":7410", "unix:relative"])
def test_a_service_listens_at_an_address_and_not_at_a_name(source: Any, address: str) -> None:
    with pytest.raises(ConfigError, match="--listen"):
        source.load(["--listen", address, "--tls-cert", "a", "--tls-key", "b", "--auth-tokens", "c"], {})


@pytest.mark.parametrize("address", OPEN)
def test_metrics_stay_on_this_host(address: str) -> None:
    with pytest.raises(ConfigError, match="--metrics-listen: only loopback"):
        CACHE.load(["--metrics-listen", address], {})


@pytest.mark.parametrize("flags", [["--cache", "{}"], ["--take-over", "{}"], ["--role", "decode", "--prefill", "[::1]:1,{}"]])
@pytest.mark.parametrize("address", ["10.0.0.7:7410", "cache.example.net:7410", "[2001:db8::1]:7410"])
def test_an_engine_reaches_other_hosts_over_tls_alone(flags: list[str], address: str) -> None:
    argv = [word.format(address) for word in flags]
    with pytest.raises(ConfigError, match=f"^{flags[-2]}: .* needs TLS, see --cache-tls-ca"):
        ENGINE.load(argv, {})
    ENGINE.load([*argv, "--cache-tls-ca", "/file"], {})


@pytest.mark.parametrize(
    "given", [["--cache-tls-cert", "a"], ["--cache-tls-key", "a"], ["--cache-tls-cert", "a", "--cache-tls-key", "b"]]
)
def test_an_engine_shows_a_certificate_whole_and_over_tls(given: list[str]) -> None:
    with pytest.raises(ConfigError, match="--cache-tls-cert: goes with"):
        ENGINE.load(given, {})


def files(folder: Path) -> dict[str, Any]:
    ca = authority()
    cert, key = issue("service", ca, names=SERVER_NAMES).write(folder, "server")
    (folder / "ca.pem").write_bytes(ca.pem)
    tokens = TokenFile(folder / "tokens")
    tokens.add(Caller("a", "*", Role.CLIENT))
    return {"tls_cert": cert, "tls_key": key, "tls_client_ca": folder / "ca.pem", "auth_tokens": tokens.path}


def test_good_files_make_a_guard(tmp_path: Path) -> None:
    guard = Guard(Config(**files(tmp_path)))
    assert guard.has_gate and guard.tls is not None and len(guard.interceptors) == 1


@pytest.mark.parametrize("name", ["tls_cert", "tls_key", "tls_client_ca", "auth_tokens"])
@pytest.mark.parametrize("wrong", ["gone", "text", "empty", "folder"])
def test_a_wrong_file_is_told_at_start(tmp_path: Path, name: str, wrong: str) -> None:
    given = files(tmp_path)
    path: Path = given[name]
    path.unlink()
    if wrong == "folder":
        path.mkdir()
    elif wrong != "gone":
        path.touch(mode=0o600)
        path.write_text("secret" if wrong == "text" else "")
    with pytest.raises(StartError, match=r"^--(tls-cert|auth-tokens): ") as refused:
        Guard(Config(**given))
    assert "\n" not in str(refused.value)


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    given = files(tmp_path)
    issue("other", None).write(tmp_path, "other")
    with pytest.raises(StartError, match="are not a certificate and its key"):
        Guard(Config(**(given | {"tls_key": tmp_path / "other.key"})))


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o604])
@pytest.mark.parametrize("name", ["tls_key", "auth_tokens"])
def test_a_secret_that_others_can_read_is_refused(tmp_path: Path, name: str, mode: int) -> None:
    given = files(tmp_path)
    given[name].chmod(mode)
    with pytest.raises(StartError, match="chmod 600"):
        Guard(Config(**given))


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o757, 0o755, 0o700, 0o775])
def test_no_socket_in_a_folder_where_everybody_may_replace_it(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    folder.chmod(mode)
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        with pytest.raises(AddressInUse, match=r"everybody may replace files in .*: chmod o-w"):
            SocketLock(folder / "s")
        assert list(folder.iterdir()) == []
    else:
        SocketLock(folder / "s").release()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o750, 0o707, 0o1777])
def test_the_folders_of_memory_are_for_one_user(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(AddressInUse, match="must be yours with mode 0700"):
        private_directory(folder)
    assert private_directory(folder / "made" / "anew").stat().st_mode & 0o777 == 0o700
    private_directory(folder / "made" / "anew")
    (folder / "file").write_text("")
    with pytest.raises(AddressInUse):
        private_directory(folder / "file")


@pytest.fixture
def said_on_stderr(capsys: pytest.CaptureFixture[str]) -> Iterator[pytest.CaptureFixture[str]]:
    yield capsys
    structlog.reset_defaults()  # main sent the log to a stream that ends with this test


def test_the_program_says_it_in_one_line_and_ends(said_on_stderr: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cache_main(["--listen", "0.0.0.0:0"]) == 2
    said = said_on_stderr.readouterr().err
    assert said.startswith("kvkeeper cache: --listen: only loopback addresses and Unix sockets are served without credentials")
    assert said.count("\n") == 1
    given = files(tmp_path)
    given["tls_key"].chmod(0o644)
    argv = [word for name, path in given.items() for word in (f"--{name.replace('_', '-')}", str(path))]
    assert cache_main(["--listen", "0.0.0.0:0", "--pool-memory", "64KiB", "--runtime-dir", str(tmp_path / "run"), *argv]) == 1
    said = said_on_stderr.readouterr().err
    assert said.startswith("kvkeeper cache: --tls-cert: ") and "chmod 600" in said and said.count("\n") == 1
