"""Files and folders that other users of the machine made, or could change, are refused by name."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncdp.process.private_files import check_path, private_folder, read_private, write_private

#: Another user of the machine.
OTHER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other users")


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    """Tests of modes do not depend on the umask of whoever runs them."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    """Permission bits."""
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_private_file_is_for_its_user_alone(tmp_path: Path) -> None:
    """Mode 600 whatever the umask, also where a file that all could read was there before; no draft is left."""
    os.umask(0)
    file = tmp_path / "plane.json"
    file.write_text("old")
    write_private(file, "new")
    assert (mode(file), read_private(file)) == (0o600, "new")
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_is_not_to_be_replaced_stays(tmp_path: Path) -> None:
    """The first writer wins, and the second one leaves no draft."""
    file = tmp_path / "password"
    write_private(file, "first", replace=False)
    with pytest.raises(FileExistsError):
        write_private(file, "second", replace=False)
    assert read_private(file) == "first"
    assert list(tmp_path.iterdir()) == [file]


def test_nothing_is_written_where_others_could_replace_it(tmp_path: Path) -> None:
    """A password in a folder that all may write to would be whose they like; no draft is left there."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(PermissionError, match="other users can replace"):
        write_private(shared / "password", "text")
    assert not list(shared.iterdir())


def test_a_link_is_replaced_and_what_it_points_to_stays(tmp_path: Path) -> None:
    """Nothing is written through a link, and nothing is read through one."""
    victim, link = tmp_path / "victim", tmp_path / "plane.json"
    victim.write_text("precious")
    victim.chmod(0o600)
    link.symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        read_private(link)
    write_private(link, "new")
    assert not link.is_symlink()
    assert (victim.read_text(), read_private(link)) == ("precious", "new")


def test_drafts_that_somebody_foresaw_are_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a draft's name that was guessed is no way in: the draft is made exclusively."""
    monkeypatch.setattr("asyncdp.process.private_files.secrets.token_hex", lambda _: "guessed")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".plane.json.guessed").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_private(tmp_path / "plane.json", "new")
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o620, 0o602, 0o666])
def test_a_file_that_others_can_read_or_write_is_not_read(tmp_path: Path, bits: int) -> None:
    """A password that others know, or chose, is none: the error names the file, its mode and what to do."""
    file = tmp_path / "password"
    file.write_text("chosen by another")
    file.chmod(bits)
    with pytest.raises(PermissionError, match=rf"password has mode {bits:o}.*chmod 600"):
        read_private(file)


def test_what_is_no_regular_file_is_not_read(tmp_path: Path) -> None:
    """A pipe would keep the reader waiting."""
    os.mkfifo(tmp_path / "password", 0o600)
    with pytest.raises(PermissionError, match="no regular file"):
        read_private(tmp_path / "password")


def test_a_folder_is_made_private(tmp_path: Path) -> None:
    """Also below one that is not there; again it is taken as it is."""
    folder = tmp_path / "a" / "b"
    private_folder(folder)
    assert mode(folder) == 0o700
    private_folder(folder)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is no folder"):
        private_folder(tmp_path / "file")


@pytest.mark.parametrize("bits", [0o777, 0o702, 0o1777])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, bits: int) -> None:
    """Also with the sticky bit: others could put files there before us."""
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(bits)
    with pytest.raises(PermissionError, match=rf"{folder}.*(chmod|mode)"):
        private_folder(folder)
    if not bits & stat.S_ISVTX:
        with pytest.raises(PermissionError, match=str(folder)):
            private_folder(folder / "below")


@as_root
@pytest.mark.parametrize("what", ["folder", "above", "link", "link to a folder of ours", "group"])
def test_folders_and_links_of_other_users_are_refused(tmp_path: Path, what: str) -> None:
    """Wherever on the way they lie: their owner can put another folder there at any time."""
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    theirs.mkdir()
    mine.mkdir()
    match what:
        case "folder":
            os.chown(theirs, OTHER, OTHER)
            folder = theirs
        case "above":
            os.chown(theirs, OTHER, OTHER)
            folder = theirs / "below"
            folder.mkdir()
        case "link":
            os.chown(theirs, OTHER, OTHER)
            folder = tmp_path / "link"
            folder.symlink_to(theirs)
        case "link to a folder of ours":
            folder = tmp_path / "link"
            folder.symlink_to(mine)
            os.lchown(folder, OTHER, OTHER)
        case _:
            os.chown(theirs, os.geteuid(), OTHER)
            theirs.chmod(0o770)
            folder = theirs
    with pytest.raises(PermissionError, match=f"{OTHER}|mode 770"):
        private_folder(folder)


def test_a_group_of_the_user_alone_is_no_other(tmp_path: Path) -> None:
    """With a umask of 002 folders are writable for the user's own group, which has the user's number."""
    folder = tmp_path / "shared"
    folder.mkdir()
    os.chown(folder, -1, os.geteuid())
    folder.chmod(0o775)
    private_folder(folder)


@as_root
def test_a_file_of_another_user_is_not_read(tmp_path: Path) -> None:
    """Whatever its mode."""
    file = tmp_path / "password"
    file.write_text("chosen by another")
    file.chmod(0o600)
    os.chown(file, OTHER, OTHER)
    with pytest.raises(PermissionError, match=f"password belongs to user {OTHER}"):
        read_private(file)


def test_a_path_through_links_of_ones_own_is_fine(tmp_path: Path) -> None:
    """A large disk is often reached by a link."""
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "data").symlink_to(disk)
    check_path(tmp_path / "data")
    private_folder(tmp_path / "data" / "plane")
    assert (disk / "plane").is_dir()


@as_root
@pytest.mark.parametrize("links", [1, 2, 3])
def test_each_link_of_a_chain_is_looked_at(tmp_path: Path, links: int) -> None:
    """A link of ours that leads to one of theirs, and that back to us: its owner may turn it round at any time."""
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    mine.mkdir()
    theirs.mkdir()
    (theirs / "link").symlink_to(mine)
    for path in (theirs, theirs / "link"):
        os.chown(path, OTHER, OTHER, follow_symlinks=False)
    last = theirs / "link"
    for number in range(links):
        link = tmp_path / f"link{number}"
        link.symlink_to(last if number % 2 else os.path.relpath(last, tmp_path))
        last = link
    for folder in (last, last / "below"):
        with pytest.raises(PermissionError, match=f"theirs belongs to user {OTHER}"):
            private_folder(folder)
    with pytest.raises(PermissionError, match=f"theirs belongs to user {OTHER}"):
        write_private(last / "plane.json", "password")
    assert not list(mine.iterdir())  # nothing was made on the way


@as_root
def test_a_way_up_from_their_folder_is_refused(tmp_path: Path) -> None:
    """``..`` after a link is the parent of where the link leads, whatever the path looks like."""
    theirs, link = tmp_path / "theirs", tmp_path / "link"
    (theirs / "below").mkdir(parents=True)
    for path in (theirs, theirs / "below"):
        os.chown(path, OTHER, OTHER)
    link.symlink_to(theirs / "below")
    for path in (link / ".." / "plane", link / ".." / ".." / "mine"):
        with pytest.raises(PermissionError, match=f"theirs.* belongs to user {OTHER}"):
            private_folder(path)
        with pytest.raises(PermissionError, match=f"theirs.* belongs to user {OTHER}"):
            write_private(path / "plane.json", "password")
    with pytest.raises(PermissionError, match=f"theirs.* belongs to user {OTHER}"):
        write_private(link / ".." / "plane.json", "password")
    private_folder(tmp_path / ".." / tmp_path.name / "ours")
    up = tmp_path / "up"
    up.symlink_to("link/../../mine")
    (tmp_path / "mine").mkdir()
    with pytest.raises(PermissionError, match=f"theirs belongs to user {OTHER}"):
        private_folder(up)
    assert [path.name for path in theirs.iterdir()] == ["below"]


def test_links_in_a_circle_and_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A circle is an error; a relative path begins at this folder; a relative link, also up, at its own."""
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        check_path(tmp_path / "a")
    disk = tmp_path / "disk" / "1"
    disk.mkdir(parents=True)
    (disk / "back").symlink_to("../../disk/./1")
    monkeypatch.chdir(tmp_path)
    private_folder(Path("disk/1/back/plane"))
    assert mode(disk / "plane") == 0o700
    write_private(Path("file"), "text")
    assert read_private(tmp_path / "file") == "text"
