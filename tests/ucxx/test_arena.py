import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from asyncdp.errors import DataPlaneUnavailable
from asyncdp.transports.ucxx.host.recovery import recover_slots
from asyncdp.transports.ucxx.slots.arena import PAGE, Arena, arena_name, sweep_arenas
from asyncdp.transports.ucxx.slots.header import Header, Outcome, State, read_state, write_outcome
from asyncdp.transports.ucxx.slots.table import SlotTable
from asyncdp.transports.ucxx.slots.writer_process import Process, this_machine, this_process
from tests.ucxx import segments

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """/dev/shm looks afterwards as it did before."""
    before = segments.leftovers()
    yield
    assert segments.leftovers() == before


def run(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, to its end."""
    script = "import os, signal, sys\nfrom tests.ucxx import segments\n" + code
    return subprocess.run(
        [sys.executable, "-c", script, *args], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )


def test_a_name_belongs_to_a_host_of_a_plane() -> None:
    """The same at each start; another for another host or plane."""
    names = {arena_name("h"), arena_name("g"), arena_name("h", "plane")}
    assert len(names) == 3
    assert arena_name("h") == arena_name("h")


def test_the_header_tells_whose_it_is() -> None:
    """Who attaches sees epoch, units and data of the owner, and nothing where host or epoch are others."""
    with segments.arena() as made:
        other = Arena.attach(made.name, "h", 7)
        assert other is not None
        assert (other.epoch, other.units, other.unit_bytes) == (7, made.units, made.unit_bytes)
        made.data[-1] = 42
        assert other.data[-1] == 42
        other.close()
        assert Arena.attach(made.name, "g", 7) is None
        assert Arena.attach(made.name, "h", 8) is None
    assert Arena.attach(made.name, "h", 7) is None


def test_payloads_begin_a_cache_line_past_a_page() -> None:
    """Where copies are fast."""
    with segments.arena() as made:
        assert {made.payload_at(slot) % PAGE for slot in range(made.units)} == {64}


def test_too_little_shared_memory_is_an_error_in_words() -> None:
    """Docker's 64 MB: an error at the start that says what is needed, no SIGBUS later, and no segment left."""
    with pytest.raises(DataPlaneUnavailable, match="shm-size") as caught:
        Arena.create(segments.fresh_name(), "h", epoch=1, data_bytes=1 << 44, unit_bytes=1 << 30)
    assert not caught.value.retryable


@pytest.mark.slow
def test_a_process_that_only_attached_leaves_the_arena_alone() -> None:
    """Python 3.11's SharedMemory would unlink it at that process's exit."""
    with segments.arena() as made:
        code = "from asyncdp.transports.ucxx.slots.arena import Arena\n"
        code += "assert Arena.attach(sys.argv[1], 'h', 7).data[-1] == 9"
        made.data[-1] = 9
        done = run(code, made.name)
        assert done.returncode == 0, done.stderr
        assert made.name in segments.leftovers()


def test_a_host_that_lives_keeps_its_arena() -> None:
    """A second host of that name, and the sweeper, are told so by the lock."""
    with segments.arena() as made:
        for take in (lambda: Arena.recover(made.name, "h"), lambda: Arena.discard(made.name)):
            with pytest.raises(DataPlaneUnavailable, match="runs on this machine"):
                take()
        assert made.name not in sweep_arenas(-1e9)


def test_arenas_of_hosts_that_never_return_are_swept() -> None:
    """Only those that no host holds, and whose host has been silent for long enough."""
    with segments.arena() as lives:
        dead = Arena.create(segments.fresh_name(), "h", epoch=7, data_bytes=1 << 16)
        watcher = Arena.attach(dead.name, "h", 7)
        assert watcher is not None
        dead.close()
        assert dead.name not in sweep_arenas(60.0)
        assert dead.name in sweep_arenas(60.0, now=time.time() + 61)
        assert watcher.given_up
        assert lives.name in segments.leftovers()
        watcher.close()


def test_a_damaged_or_foreign_segment_is_not_adopted() -> None:
    """Another host's, or one whose header does not add up: None, and a fresh one can be made after discard."""
    with segments.arena() as made:
        name = made.name
        made.close()
        assert Arena.recover(name, "g") is None
        again = Arena.recover(name, "h")
        assert again is not None
        again.data[20] ^= 1
        again.close()
        assert Arena.recover(name, "h") is None
        assert Arena.discard(name)
        assert not Arena.discard(name)
        made.words.release()
        assert name not in segments.leftovers()
        made._given_up[0] = 1


def test_an_arena_of_another_version_is_refused_by_name() -> None:
    """Its rows are neither read as something else nor thrown away, unless that is asked for (adoption off)."""
    with segments.arena() as made:
        name = made.name
        made.close()
        made.data[8] += 1  # the version, behind eight bytes of magic
        with pytest.raises(DataPlaneUnavailable, match=f"{name} is of version 2, .* version 1: .* without adoption"):
            Arena.recover(name, "h")
        assert Arena.attach(name, "h", 7) is None
        assert name in segments.leftovers()
        made.data[8] -= 1
        again = Arena.recover(name, "h")
        assert again is not None
        again.close()


def test_the_header_is_the_one_of_its_version() -> None:
    """What version 1 means: the bytes that a host of commit 125739f wrote. Another form needs another version."""
    with segments.arena(64 << 10) as made:
        header = bytes(made.data[:176])
    assert header[:48].hex() == (
        "4144504152454e410100000000400000040000000000000007000000000000000020000000000000"
        "0020010000000000"
    )  # fmt: skip
    assert header[48:] == b"h" + bytes(127)


CRASH = """
from asyncdp.transports.ucxx.slots.arena import Arena
from asyncdp.transports.ucxx.slots.table import SlotTable
from asyncdp.transports.ucxx.slots.header import Outcome, write_outcome
from asyncdp.transports.ucxx.slots.writer_process import Process, this_process
made = Arena.create(sys.argv[1], "h", epoch=7, data_bytes=1 << 20)
table = SlotTable(made, max_slot_bytes=1 << 19)
segments.put(table, "ready", segments.rows(4, fill=5.0))
segments.put(table, "freed", segments.rows(4, fill=6.0))
for slot in table.of_op("freed"):
    table.drop(slot.number, slot.generation, range(4))
parent = Process(int(sys.argv[2]), int(sys.argv[3]))
for op, writer in (("remote", None), ("lives", parent), ("dies", this_process()), ("finished", this_process())):
    for grant in table.reserve(op, ("a",), [32], 0, 1e18, writer):
        segments.write(table, grant, segments.rows(1, fill=7.0))
        if op == "finished":
            write_outcome(made, grant.slot, grant.generation, Outcome.WRITTEN)
for op in ("ready", "freed", "remote", "lives", "dies", "finished"):
    print(op, *[f"{slot.number}:{slot.generation}" for slot in table.of_op(op)], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_host_adopts_its_arena() -> None:
    """READY slots serve on, WRITING ones live while their writer does, and the space of the others comes back."""
    name, me = segments.fresh_name(), this_process()
    done = run(CRASH, name, str(me.pid), str(me.start))
    assert done.returncode == -signal.SIGKILL, done.stderr
    places = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    arena = Arena.recover(name, "h")
    assert arena is not None
    try:
        table = SlotTable(arena, max_slot_bytes=1 << 19)
        assert recover_slots(table) == {"kept": 3, "freed": 2, "damaged": 0}
        assert arena.epoch == 7
        for op, fill, n in (("ready", 5.0, 4), ("finished", 7.0, 1)):
            number, generation = map(int, places[op].split(":"))
            attempt = table.begin_read(number, generation, ("a",), range(n))
            assert not isinstance(attempt, Exception), attempt
            payload = table.payload(attempt, ("a",), range(n))
            assert not isinstance(payload, Exception)
            assert (segments.values(payload) == fill).all()
            assert table.finish_read(attempt)
        assert table.of_op("lives")
        assert not table.of_op("remote")
        assert not table.of_op("dies")
        for op in ("ready", "finished", "lives"):
            table.abort(op, 0.0, idle=True)
        assert table.free_bytes == arena.units * arena.unit_bytes
        assert table.extents.largest == arena.units
    finally:
        arena.unlink()


def test_with_adoption_off_the_old_segment_is_gone_and_says_so() -> None:
    """Who has it mapped sees that nothing in it is content any more."""
    with segments.arena() as old:
        reader = Arena.attach(old.name, "h", 7)
        assert reader is not None
        old.close()
        assert Arena.discard(old.name)
        new = Arena.create(old.name, "h", epoch=8, data_bytes=1 << 16)
        assert reader.given_up
        assert Arena.attach(new.name, "h", 7) is None
        new.unlink()
        reader.close()


@pytest.mark.parametrize(("units", "capacity"), [(1 << 20, 64), (1, 1 << 30), (1, 1 << 15), (0, 64)])
def test_damaged_slot_headers_cost_their_slots_only(units: int, capacity: int) -> None:
    """A header whose checksum is wrong, or that says more than its stretch holds, is freed; the others are kept."""
    with segments.arena() as made:
        table = SlotTable(made, max_slot_bytes=1 << 19)
        first, second, third = (segments.put(table, op, segments.rows(2))[0] for op in "abc")
        made.words[second.slot * 16 + 5] ^= 1
        header = Header.read(made, third.slot, third.generation)
        assert header is not None
        Header(units, 2, 1, None, b"x" * 16, 0.0, 0, capacity).write(made, third.slot, third.generation)
        table = SlotTable(made, max_slot_bytes=1 << 19)
        assert recover_slots(table) == {"kept": 1, "freed": 0, "damaged": 2}
        assert list(table.slots) == [first.slot]
        assert read_state(made, second.slot) == (State.FREE, second.generation)


@pytest.mark.parametrize("seed", range(8))
def test_nonsense_in_the_table_crashes_nobody(seed: int) -> None:
    """Random headers: none is taken over, and the arena is usable."""
    with segments.arena(1 << 18) as made:
        noise = np.random.default_rng(seed).integers(0, 256, made.units * 128, dtype=np.uint8)
        made.data[PAGE : PAGE + len(noise)] = noise
        table = SlotTable(made, max_slot_bytes=1 << 17)
        recover_slots(table)
        assert not table.slots
        assert segments.put(table, "a", segments.rows(2))


def test_a_process_is_known_by_pid_and_start() -> None:
    """A pid that was given to another process is another process; a dead one does not live."""
    me = this_process()
    assert me.is_alive()
    assert not Process(me.pid, me.start + 1).is_alive()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        start = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
        assert Process(child.pid, start).is_alive()
        child.kill()
        while Process(child.pid, start).is_alive():  # a zombie counts as dead, before it is waited for
            time.sleep(0.001)
    finally:
        child.communicate()
    assert this_machine() == this_machine()


def test_the_writer_s_word_is_of_its_generation() -> None:
    """What a late writer says about an older generation is not heard."""
    with segments.arena() as made:
        table = SlotTable(made, max_slot_bytes=1 << 19)
        (grant,) = table.reserve("a", ("a",), [32], 0, 1e18, this_process())
        write_outcome(made, grant.slot, grant.generation - 1, Outcome.WRITTEN)
        slot = table.find(grant.slot, grant.generation)
        assert slot is not None
        assert table.apply_outcome(slot) is State.WRITING


@pytest.fixture
def foreign() -> Iterator[str]:
    """A name under which another user made something first."""
    name = segments.fresh_name()
    yield name
    Path("/dev/shm", name).unlink(missing_ok=True)


def _copy_of_an_arena(path: Path) -> None:
    """Put the bytes of a valid arena there, as who knows the format can."""
    with segments.arena() as made:
        path.write_bytes(made.data.tobytes())


@pytest.mark.parametrize("what", ["open to all", "readable by all", "of another user", "a link", "a pipe"])
def test_a_segment_that_others_could_touch_is_refused_by_name(foreign: str, what: str) -> None:
    """Not adopted, replaced, mapped or swept: its maker could read rows, or end the host (SIGBUS)."""
    path = Path("/dev/shm", foreign)
    if what == "a link":
        with segments.arena() as made:
            path.symlink_to(Path("/dev/shm", made.name))
            _refused(foreign)
        return
    if what == "a pipe":
        os.mkfifo(path)
        path.chmod(0o666)
    else:
        _copy_of_an_arena(path)
        path.chmod({"open to all": 0o666, "readable by all": 0o604, "of another user": 0o600}[what])
    if what == "of another user":
        if os.geteuid() != 0:
            pytest.skip("only root can make segments of other users")
        os.chown(path, 12345, 12345)
    _refused(foreign)


def _refused(name: str) -> None:
    path = Path("/dev/shm", name)
    for take in (Arena.recover, lambda name, _: Arena.discard(name)):
        with pytest.raises(DataPlaneUnavailable, match=f"{name} cannot be used.*`host_id`") as caught:
            take(name, "h")
        assert not caught.value.retryable
    assert Arena.attach(name, "h", 7) is None
    assert name not in sweep_arenas(-1e9)
    assert path.is_symlink() or path.exists()
    with pytest.raises(FileExistsError):
        Arena.create(name, "h", epoch=8, data_bytes=segments.MIB)


def test_a_folder_of_the_name_of_a_segment_is_refused_by_name() -> None:
    """Whoever made it."""
    name = segments.fresh_name()
    folder = Path("/dev/shm") / name
    folder.mkdir(mode=0o700)
    try:
        with pytest.raises(DataPlaneUnavailable, match=f"{name} is no file"):
            Arena.recover(name, "h")
    finally:
        folder.rmdir()
