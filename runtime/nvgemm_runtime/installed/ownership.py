"""Write access to files: loading a bundle runs its code, so others must not change it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_MAX_LINKS = 40
"""Most symbolic links in a path, as in Linux (path_resolution(7))."""


def writable_by_others(file: Path) -> str | None:
    """Returns the reason that others than this user and root control a file or directory, or None.

    Raises:
        OSError: If it does not exist.
    """
    return next(filter(None, map(path_writable_by_others, _path_components(file))), None)


def path_writable_by_others(path: Path) -> str | None:
    """Returns the reason that others can write a path itself, ignoring its parents, or None.

    Raises:
        OSError: If it does not exist.
    """
    status = path.lstat()
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to another user (uid {status.st_uid}), who could change it"
    if stat.S_ISLNK(status.st_mode):
        return None  # a link's mode means nothing; replacing it takes write access to its directory
    # In a sticky directory others can add files, but not replace those of this user.
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
        mode = stat.filemode(status.st_mode)
        return f"{path} can be written by others ({mode}); run: chmod go-w {path}"
    return None


def _path_components(path: Path) -> Iterator[Path]:
    """Yields every directory, link and file that decides where an absolute path leads."""
    current = Path("/")
    yield current
    links = 0
    remaining = list(reversed(path.parts[1:]))
    while remaining:
        part = remaining.pop()
        if part == "..":
            current = current.parent
            continue
        component = current / part
        yield component
        if not component.is_symlink():
            current = component
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = component.readlink()
        if target.is_absolute():
            current = Path("/")
        remaining += [part for part in reversed(target.parts) if part != "/"]
