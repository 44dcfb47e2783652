from trinity_lightning.common.experience import EID


def test_identifiers_of_an_eid():
    eid = EID(batch=1, task=2, run=3, step=4, suffix="abc123")
    assert eid.uid == str(eid) == "1/2/3/4/abc123"
    assert (eid.sid, eid.rid, eid.tid) == ("1/2/4", "1/2/3", "1/2")
    assert repr(eid) == "EID(batch=1, task=2, run=3, step=4, uuid=abc123)"
    assert eid.to_dict() == {"batch": 1, "task": 2, "run": 3, "step": 4, "suffix": "abc123"}
    assert EID(**eid.to_dict()) == eid


def test_default_suffixes_are_12_hex_digits_and_do_not_collide():
    suffixes = {EID().suffix for _ in range(20_000)}
    assert len(suffixes) == 20_000
    assert all(len(suffix) == 12 and int(suffix, 16) >= 0 for suffix in suffixes)
