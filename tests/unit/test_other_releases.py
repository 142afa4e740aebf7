"""What travels between processes may come from another release: it is read as it was meant, or refused by name."""

from __future__ import annotations

import base64
import dataclasses
import pickle

import pytest

from asyncdp import DataPlaneBadRequest
from asyncdp.meta import DataPlaneCapabilities, DataPlaneGroupMeta, KVBatchMeta, RowHandle

#: Pickles that commit 125739f made, which knew no bound puts: of a claim's meta, and of a group.
OLD_META = base64.b85decode(
    "fCQEI000000001t3}JJ5ZewI{E^TFWVU&yuOIAW*bYo~uWprVblawielumt=D2xnnVRCe7bZKvHUuk5Ni~(?zj0tpMb8BC2VQpoUj0JOJZ*panj0$sMZE"
    "$R5Uuk4>lwFi4i~(Vki~(YlWsC-9X=Q9=bCg|_i~)F*VT=%SWpQ<7ZewL%Y-Mg|bZB#wPK*j=cyw}MUukY;Z<KwMi~(zuO969?1ax6%bCg|_D1DTS0dAB_"
    "0dswnXctQYb7hPNXkl(-Y-MwlU6d$j0E`JzZ+A#xZe(m_l#`T82aE+{Y+-3_lun0~fs|+*O9)O*hm?VoWp##>VlD"
)
OLD_GROUP = base64.b85decode(
    "fCQCf000000001t3}JJ5ZewI{E^TFWVU&y#L}7GcP;6mtWk+&vb#P5(bYYZ}lqrFfU6d${0dSOz0cVtq0b!Jk0b-PfluH9gKllIu00000h)V)XKz)>q0d"
    "AB_0dswnXbVdMbB2^DWnwM"
)
#: The attributes of a KVBatchMeta there: it takes no others.
OLD_ATTRIBUTES = {
    "partition_id", "task_name", "sample_ids", "fields", "sequence_lengths", "extra_info", "tags", "handles",
}  # fmt: skip


def test_a_meta_of_an_older_release_is_read() -> None:
    """A checkpointed claim names the same rows and lives; what the older release did not know has its default."""
    meta = pickle.loads(OLD_META)
    handles = [RowHandle(7, "claim"), RowHandle(8)]
    assert meta == KVBatchMeta("p", "score", ["a", "b"], ["x"], None, {"k": 1}, [{"n": 1}, {"n": 2}], handles)
    assert meta.subset([1]).created is None


def test_a_group_of_an_older_release_is_read() -> None:
    """A group that was listed by an older release names no lives: a removal by it means its ids."""
    group = pickle.loads(OLD_GROUP)
    assert (group.keys, group.expected_num_keys, group.lost_keys, group.handles) == (("a", "b"), 2, (), ())
    assert group.is_complete


def test_an_older_release_reads_the_meta_of_a_claim() -> None:
    """Its pickle holds what the older release knows, in the form that it reads; what a put adds it refuses by name."""
    meta = pickle.loads(OLD_META)
    nothing, state = meta.__reduce_ex__(4)[2]
    assert nothing is None
    assert set(state) == OLD_ATTRIBUTES
    meta.created = [True, False]
    assert pickle.loads(pickle.dumps(meta)).created == [True, False]
    assert set(meta.__reduce_ex__(4)[2][1]) == OLD_ATTRIBUTES | {"created"}


def test_capabilities_of_an_older_release_lack_what_it_did_not_have() -> None:
    """An attribute that came later is False, not missing."""
    old = object.__new__(DataPlaneCapabilities)
    old.__setstate__([True] * 10)  # type: ignore[attr-defined]
    assert old.claim_dedup
    assert not old.bound_mutations


def test_a_pickle_that_lacks_what_must_be_there_is_refused_by_name() -> None:
    """No half-made meta comes to life."""
    group = object.__new__(DataPlaneGroupMeta)
    with pytest.raises(DataPlaneBadRequest, match=r"DataPlaneGroupMeta was pickled by another release.*no keys"):
        group.__setstate__(["p", "g"])  # type: ignore[attr-defined]
    assert len(dataclasses.fields(group)) > 2
