"""Files, classes and functions have the names of the field, not those of a former dialect."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Words that a name must not have, in any form, with the term to use instead.
FORMER = {
    r"obituar(y|ies)": "invalidation",
    r"doors?": "port, route",
    r"known_hosts?": "host resolver, directory entry",
    r"remed(y|ies)": "ucx_watchdog, action",
    r"(spin|descriptor)_watch": "ucx_watchdog",
    r"settled?": "reconcile, resolve",
    r"ledgers?": "pending outcomes",
    r"debts?": "pending outcomes",
    r"ow(e|es|ed)": "record",
    r"canar(y|ies)": "heartbeat",
    r"adopt(s|ed|ion)?": "recover",
    r"witness(es)?": "request tracker",
    r"standstill": "watchdog",
    r"crowds?": "seed runner, connection limit",
    r"troubles?": "fault schedule",
    r"on_loop": "loop fixtures",
    r"texts": "msgpack codec",
    r"knocks?": "authenticate",
}
#: Words that are no name by themselves; within a longer one they are plain English, as in ``MemoryShare``.
FORMER_ALONE = {
    r"ways?|reach(es)?|access(es)?": "port, route, host resolver, host client, directory entry",
    r"turns?|shares?": "time slices, slot split",
    r"pa(y|ys|id)": "resolve",
    r"touch(es)?|accounts?|life": "overlapping mutations, live bytes, open waits",
    r"published": "advertised address",
    r"ops?": "operation ids",
    r"codec": "padding, msgpack codec, object codec",
}
#: Classes that had several meanings: one of each at the most.
ONCE = ("Link", "Place", "Session")
#: Names that have such a word all the same, by file or as file:name, with the reason.
EXCEPTIONS = {
    "asyncdp/recovery/ledger.py": "CapacityLedger accounts for reserved capacity, which is what a ledger is",
    "tests/recovery/test_ledger.py": "tests it",
    "asyncdp/calls/answers.py:published": "makes the result of Publish",
    "asyncdp/calls/slots.py:Published": "the result of Publish",
    "transports/ucxx/directory/requests/publishing.py:Published": "the result of publishing a put",
    "tests/transfer_queue/test_directory_model.py:Published": "the same",
    "asyncdp/metrics/published.py": "what clients publish for asyncdp top",
    "asyncdp/testing/simulation/recording/operation.py:life": "the life of a row, a term of the protocol",
    "asyncdp/testing/sweep/ways.py": "ways to cancel a call",
    "examples/grpo_account.py": "the account that a training loop gives of its samples",
    "tests/chaos/ucxx_stress_account.py": "the same, of a stress test",
    "tests/chaos/transfer_queue.py": "the same, of a chaos test",
    "benchmarks/_turns.py": "two checkouts are measured in turns",
    "benchmarks/layers_against.py:turn": "one of those turns",
    "benchmarks/ucxx_against.py:turn": "one of those turns",
    "tests/layers/test_adapter.py:turn": "a turn of the event loop",
}
FORBIDDEN = re.compile(rf"(^|_)({'|'.join(FORMER)})(_|$)|^_?({'|'.join(FORMER_ALONE)})$")


def words_of(name: str) -> str:
    """Return a name in snake case: ``PayPerSlot`` is ``pay_per_slot``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def names() -> Iterator[tuple[str, str]]:
    """Yield the file and the name of each module, class and function; sentences, as tests are called, are left out."""
    for folder in ("asyncdp", "middleware", "transports", "examples", "benchmarks", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            file = path.relative_to(ROOT).as_posix()
            if any((ROOT / parent).is_symlink() for parent in Path(file).parents):
                continue
            yield file, path.stem
            for node in re.findall(r"^\s*(?:async def|def|class) (\w+)", path.read_text(), re.MULTILINE):
                if not node.startswith("test_"):
                    yield file, node


def test_no_file_class_or_function_has_a_former_word() -> None:
    """Each exception has a reason, and is needed."""
    found = {(file, name) for file, name in names() if FORBIDDEN.search(words_of(name))}
    excepted = {(file, name) for file, name in found if file in EXCEPTIONS or f"{file}:{name}" in EXCEPTIONS}
    assert sorted(found - excepted) == [], f"use instead: {FORMER | FORMER_ALONE}"
    used = {file for file, _ in excepted} | {f"{file}:{name}" for file, name in excepted}
    assert EXCEPTIONS.keys() <= used


def test_a_name_has_one_meaning() -> None:
    """Of the classes whose name meant several things, there is one at the most."""
    classes = Counter(
        name
        for file, name in names()
        if name in ONCE and re.search(rf"^class {name}\b", (ROOT / file).read_text(), re.MULTILINE)
    )
    assert all(classes[name] <= 1 for name in ONCE), classes


def test_words_are_found_in_names_of_both_forms() -> None:
    """In snake and camel case, in any of their forms, and not within other words."""
    former = ("Door", "behind_doors", "_settle_one", "SpinWatch", "Op", "_turn")
    plain = ("outdoors", "Context", "owner", "adopter", "MemoryShare", "next_op_id")
    assert all(FORBIDDEN.search(words_of(name)) for name in former)
    assert not any(FORBIDDEN.search(words_of(name)) for name in plain)
