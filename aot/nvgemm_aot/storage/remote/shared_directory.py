"""A directory, such as one on NFS, as the store of a remote cache."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from urllib.parse import SplitResult, unquote

from nvgemm_runtime.errors import SettingError

from ..files import IrregularFileError, open_new_file, open_regular, sweep_partials
from .stores import KEY_PREFIX, StoreError

_MODE = 0o644
"""Permissions of entries, whatever the writer's umask: other users read them."""


class SharedDirectory:
    """Values as files of one directory, which exists. Others may write it too.

    Raises:
        SettingError: If the URL is wrong.
    """

    def __init__(self, url: SplitResult) -> None:
        if url.netloc not in ("", "localhost") or url.query or not url.path.startswith("/"):
            raise SettingError(
                "the remote cache's URL is wrong: a directory is file:///path, with three slashes"
            )
        self._directory = Path(unquote(url.path))
        self._is_swept = False
        self.address = f"file://{self._directory}"

    def get(self, key: str, most_bytes: int) -> bytes | None:
        """Reads a file; see `Store.get`. What is no file, or not readable, counts as absent."""
        try:
            with open_regular(self._path(key)) as file:
                return file.read(most_bytes + 1)
        except FileNotFoundError:
            if self._directory.is_dir():
                return None
            raise self._missing() from None
        except (IrregularFileError, IsADirectoryError):
            return None
        except PermissionError as error:
            if os.access(self._directory, os.X_OK):
                return None
            raise _failure(error) from None
        except OSError as error:
            raise _failure(error) from None

    def put(self, key: str, data: bytes) -> None:
        """Stores a file; see `Store.put`."""
        path = self._path(key)
        # Not `write_atomic`: a server that hangs would hold its lock, which local files need.
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.partial")
        try:
            if not self._is_swept:
                self._is_swept = True
                sweep_partials(self._directory)
            with os.fdopen(open_new_file(temporary, os.O_WRONLY | os.O_EXCL), "wb") as file:
                with contextlib.suppress(OSError):  # some file systems have no modes
                    os.fchmod(file.fileno(), _MODE)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except FileNotFoundError:
            raise self._missing() from None
        except OSError as error:
            raise _failure(error) from None
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def close(self) -> None:
        """Does nothing."""

    def _path(self, key: str) -> Path:
        return self._directory / (KEY_PREFIX.replace("/", "-") + key)

    def _missing(self) -> StoreError:
        return StoreError("no such directory; make it first", is_transient=False)


def _failure(error: OSError) -> StoreError:
    return StoreError(error.strerror or type(error).__name__, is_transient=False)
