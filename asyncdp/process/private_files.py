"""Reads and writes files and folders that only their user may access: secrets, and data that others must not plant.

Another user of the machine could create a file, link or folder first if its name is predictable. So a file is created
exclusively or replaced as a whole, and owner and mode are checked before anything is read or used, as sshd does.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path
from typing import Final

__all__ = ["check_owner", "check_path", "private_folder", "read_private", "write_private"]

#: Most links that a path may lead through, as the kernel's own limit.
_MOST_LINKS: Final = 40


def check_owner(found: os.stat_result, what: str, *, forbidden: int = 0o077) -> None:
    """Check that a file or folder belongs to the user of this process and has none of the ``forbidden`` mode bits.

    Args:
        found: Result of fstat or lstat for it.
        what: Its name in the error.
        forbidden: Mode bits that must not be set.

    Raises:
        PermissionError: It belongs to another user, or its mode has forbidden bits; the error names owner or mode.
    """
    me = os.geteuid()
    if found.st_uid != me:
        raise PermissionError(f"{what} belongs to user {found.st_uid}, not to user {me}, who runs this process")
    mode = stat.S_IMODE(found.st_mode)
    if mode & forbidden:
        right = mode & ~forbidden
        raise PermissionError(f"{what} has mode {mode:03o}: other users have access to it; chmod {right:03o} it first")


def _written_by_others(found: os.stat_result) -> int:
    """Return the mode bits that let others write.

    Write permission of a group with the same number as the user is allowed: by convention on Linux it has no other
    members, and with a umask of 002 all folders of a user are writable by it.
    """
    return found.st_mode & (0o002 if found.st_gid == found.st_uid else 0o022)


def check_path(folder: Path) -> None:
    """Check that no other user can replace or redirect files under a path.

    Each folder and link of the path must belong to this user or to root. Others may have write access to a folder only
    if its sticky bit keeps them from renaming files of other users, as in /tmp.

    Links are followed one at a time and ``..`` is the parent of where they lead, as for the kernel. So each link and
    each folder on the way is checked before what is in it is looked at.

    Raises:
        PermissionError: A link or folder of the path belongs to another user, or is writable by others; it is named.
        OSError: A part of the path does not exist, or its links lead in a circle.
    """
    mine = (0, os.geteuid())
    here, ahead, links = Path("/"), list(reversed(Path.cwd().joinpath(folder).parts[1:])), 0
    _check_part(here, here.lstat(), mine)
    while ahead:
        name = ahead.pop()
        if name == "..":  # "here" has no link in it, so its parent is the kernel's
            here = here.parent
            continue
        part = here / name
        entry = part.lstat()
        _check_part(part, entry, mine)
        if not stat.S_ISLNK(entry.st_mode):
            here = part
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
        target = part.readlink()
        if target.is_absolute():
            here = Path("/")
        ahead += reversed(target.parts[target.is_absolute() :])


def _check_part(part: Path, found: os.stat_result, mine: tuple[int, ...]) -> None:
    """Check a folder or link (not what it leads to) by its owner, and a folder by who may write to it."""
    open_to_others = not stat.S_ISLNK(found.st_mode) and _written_by_others(found) and not found.st_mode & stat.S_ISVTX
    if found.st_uid not in mine or open_to_others:
        mode = stat.S_IMODE(found.st_mode)
        text = f"{part} belongs to user {found.st_uid} and has mode {mode:03o}: other users can replace"
        raise PermissionError(f"{text} what is in it; name a folder of your own, or chmod go-w it")


def private_folder(folder: Path) -> None:
    """Create a folder of mode 700 if it does not exist, and check that no other user can write to it.

    Raises:
        PermissionError: The folder belongs to another user, others may write to it, or :func:`check_path` fails.
        NotADirectoryError: The path exists and is no folder.
    """
    check_path(next(above for above in (folder, *folder.absolute().parents) if os.path.lexists(above)))
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except FileExistsError as err:
        raise NotADirectoryError(f"{folder} is no folder") from err
    check_path(folder)
    found = folder.stat()
    check_owner(found, f"the folder {folder}", forbidden=_written_by_others(found))


def read_private(file: Path) -> str:
    """Read a file that only this user may read or write; a link is not followed.

    Raises:
        FileNotFoundError: The file does not exist.
        PermissionError: The file belongs to another user, is accessible to others, or is no regular file.
        OSError: The path is a link.
    """
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)) as opened:
        found = os.fstat(opened.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError(f"{file} is no regular file")
        check_owner(found, str(file))
        return opened.read()


def write_private(file: Path, text: str, *, replace: bool = True) -> None:
    """Write a file of mode 600 atomically. An existing file or link is replaced; a link is not followed.

    Args:
        file: Path of the file.
        text: Content of the file.
        replace: Whether to replace an existing file.

    Raises:
        FileExistsError: The file exists and ``replace`` is False.
        OSError: The file cannot be written, or :func:`check_path` fails.
    """
    check_path(file.parent)
    draft = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "w") as out:
            out.write(text)
        if replace:
            draft.replace(file)
        else:
            file.hardlink_to(draft)
    finally:
        draft.unlink(missing_ok=True)
