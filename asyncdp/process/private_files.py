"""Files and folders that only their user may read or write: secrets, and what must not be put there by somebody else.

Another user of the machine may make a file, a link or a folder first, where its name can be foretold. So a file is made
exclusively or replaced whole, and owner and mode are looked at before anything is read or used, as sshd does it.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

__all__ = ["check_owner", "check_path", "private_folder", "read_private", "write_private"]


def check_owner(found: os.stat_result, what: str, *, forbidden: int = 0o077) -> None:
    """Check that something belongs to this process' user and that others may not do what ``forbidden`` says.

    Args:
        found: What fstat or lstat says of it.
        what: Its name in the error.
        forbidden: Mode bits that must not be set.

    Raises:
        PermissionError: It belongs to another user, or its mode grants others too much; both are named.
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

    A group with the user's own number has, by the custom of Linux, no other member: with a umask of 002 all folders of
    a user are open to it.
    """
    return found.st_mode & (0o002 if found.st_gid == found.st_uid else 0o022)


def check_path(folder: Path) -> None:
    """Check that no other user can replace or redirect what lies under a path.

    Each folder on the way, and each link, must belong to this user or to root; others may write to a folder only where
    the sticky bit keeps them from renaming what is not theirs (/tmp).

    Raises:
        PermissionError: A link or folder on the way is another user's, or open to others; it is named.
    """
    absolute = Path(os.path.abspath(folder))  # noqa: PTH100 - resolve() would follow links that are not checked yet
    mine = (0, os.geteuid())
    for part in (absolute, *absolute.parents):
        entry = part.lstat()
        if entry.st_uid not in mine:
            raise PermissionError(f"{part} belongs to user {entry.st_uid}, who can replace what is in it")
        real = part.resolve() if stat.S_ISLNK(entry.st_mode) else part
        for each in (real, *real.parents) if real != part else (part,):
            found = each.stat()
            if found.st_uid not in mine or (_written_by_others(found) and not found.st_mode & stat.S_ISVTX):
                mode = stat.S_IMODE(found.st_mode)
                text = f"{each} belongs to user {found.st_uid} and has mode {mode:03o}: other users can replace"
                raise PermissionError(f"{text} what is in it; name a folder of your own, or chmod go-w it")


def private_folder(folder: Path) -> None:
    """Make a folder of mode 700 where there is none, and check that no other user can put anything into it.

    Raises:
        PermissionError: The folder belongs to another user or others may write to it, or see :func:`check_path`.
        NotADirectoryError: It is no folder.
    """
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
        FileNotFoundError: It is not there.
        PermissionError: It is another user's, or open to others.
        OSError: It is a link, or no regular file.
    """
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)) as opened:
        found = os.fstat(opened.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError(f"{file} is no regular file")
        check_owner(found, str(file))
        return opened.read()


def write_private(file: Path, text: str, *, replace: bool = True) -> None:
    """Write a file of mode 600, whole or not at all. What was there before, also a link, is replaced, not followed.

    Args:
        file: Where to write.
        text: What to write.
        replace: Whether a file that is there already is replaced.

    Raises:
        FileExistsError: It is there already, and is not to be replaced.
        OSError: It cannot be written, or cannot be kept from others (see :func:`check_path`).
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
