"""Addresses of schedulers, and servers that are none."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from nvgemm_aot.cli.main import main
from nvgemm_aot.pipeline.executor import scheduler_connection
from nvgemm_aot.pipeline.executor.scheduler_connection import check_address, connect
from nvgemm_runtime.errors import ExecutorError, ToolchainError

MANIFEST = "version: 1\nname: some\ntargets: [sm_100f]\ngemms: [{dtype: bf16, mnk: [[1, 512, 64]]}]"


@pytest.mark.parametrize(
    "address",
    [
        "tls://scheduler:8786",
        "tls://10.0.0.7:1",
        "tls://[2001:db8::1]:8786",
        "tcp://127.0.0.1:8786",
        "tcp://127.9.9.9:65535",
        "tcp://[::1]:8786",
        "tcp://localhost:8786",
    ],
)
def test_allows(address: str) -> None:
    assert check_address(address) == address


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("tcp://10.0.0.7:8786", "whoever reaches it can run code here and on its workers"),
        ("tcp://localhost.example.org:8786", "without TLS on another machine"),
        ("tcp://0.0.0.0:8786", "without TLS on another machine"),
        ("ucx://127.0.0.1:8786", "is no protocol for an executor"),
        ("inproc://127.0.0.1:8786", "is no protocol for an executor"),
        ("tls://scheduler", "is neither local nor an address"),
        ("scheduler:8786", "is neither local nor an address"),
        ("tls://:8786", "is neither local nor an address"),
        ("tls://scheduler:0", "is neither local nor an address"),
        ("tls://scheduler:8786/path", "is neither local nor an address"),
        ("tls://scheduler:99999", "Port out of range"),
        ("tls://a b:8786", "is no host name"),
        ("tls://[::1:8786", "such as tls://scheduler:8786"),
        ("", "is neither local nor an address"),
    ],
)
def test_refuses(address: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_address(address)


def test_repeats_no_password() -> None:
    with pytest.raises(ValueError, match="a name or a password") as caught:
        check_address("tls://user:canary@scheduler:8786")
    assert "canary" not in str(caught.value)


def test_allows_plain_tcp_if_told() -> None:
    assert check_address("tcp://10.0.0.7:8786", allow_insecure=True) == "tcp://10.0.0.7:8786"


@pytest.mark.parametrize("is_silent", [True, False])
def test_gives_up_a_server_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    pytest.importorskip("distributed", reason="needs distributed, of the extra fleet")
    monkeypatch.setattr(scheduler_connection, "CONNECT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not is_silent:
            server.close()
        reason = "does not answer within" if is_silent else "Timed out trying to connect"
        with (
            pytest.raises(ExecutorError, match=f"cannot be reached: .*{reason}.*is it running"),
            connect(f"tcp://127.0.0.1:{port}"),
        ):
            pass


def test_names_the_variables_of_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="needs distributed, of the extra fleet")
    with (
        pytest.raises(ExecutorError, match="set DASK_DISTRIBUTED__COMM__TLS__CA_FILE"),
        connect("tls://127.0.0.1:1"),
    ):
        pass


def test_names_the_extra_that_has_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with (
        pytest.raises(ToolchainError, match=r"needs distributed.*pip install '\.\[fleet\]'"),
        connect("tcp://127.0.0.1:1"),
    ):
        pass


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--executor", "tcp://10.0.0.7:8786"], "--insecure-executor"),
        (["--executor", "elsewhere"], "is neither local nor an address"),
        (["--executor", "tls://a:1", "--jobs", "2"], "cannot be combined"),
        (["--executor", "tls://a:1", "--shard", "1/2"], "cannot be combined"),
        (["--executor", "tls://a:1", "--dry-run"], "cannot be combined"),
        (["--insecure-executor"], "--insecure-executor needs --executor"),
    ],
)
def test_a_wrong_command_is_a_usage_error(
    tmp_path: Path, arguments: list[str], reason: str
) -> None:
    (tmp_path / "some.yaml").write_text(MANIFEST)
    result = CliRunner().invoke(main, ["build", str(tmp_path / "some.yaml"), *arguments])
    assert result.exit_code == 2
    assert reason in result.output


def test_an_executor_needs_a_remote_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some.yaml").write_text(MANIFEST)
    command = ["build", str(tmp_path / "some.yaml"), "--executor", "tls://scheduler:8786"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == ExecutorError.exit_code
    assert "set NVGEMM_AOT_REMOTE_CACHE here and on the workers" in result.output
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv("NVGEMM_AOT_REMOTE_CACHE", f"file://{tmp_path}/shared")
    result = CliRunner().invoke(main, command)
    assert result.exit_code == ExecutorError.exit_code
    assert "set NVGEMM_AOT_POLICY to a policy with the workers' keys" in result.output
