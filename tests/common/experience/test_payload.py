"""Damaged and forged payloads are refused soon, and without running or allocating what they claim.

TRINITY_FUZZ_PAYLOADS=100000 runs more of them than the suite does.
"""

import os
import pickle
import random
import struct
import sys
import time
import tracemalloc
from collections.abc import Iterator

import msgpack
import pytest
import torch
import xxhash
from support.experiences import pictured, plain_sample, sample, write_version_1

from trinity_lightning.common.experience import Experience, ExperienceFormatError

PAYLOADS = int(os.environ.get("TRINITY_FUZZ_PAYLOADS", "3000"))
SECONDS = 5.0  # of CPU time: a thousand times as long as any takes, and far from what a forged one could make it take
SLACK = 2_000_000  # bytes that an import, a traceback or a cache may take

_events: list[str] = []
_watching = False


def _audit(event: str, args: object) -> None:
    if _watching and event in {"exec", "os.system", "subprocess.Popen", "pickle.find_class", "open", "socket.connect"}:
        _events.append(f"{event} {args!r:.200}")


def seal(payload: bytearray) -> bytearray:
    """A version 2 payload with the checksum that its content has."""
    digest = xxhash.xxh3_64(bytes(payload[:24]))
    digest.update(bytes(payload[32:]))
    struct.pack_into("<Q", payload, 24, digest.intdigest())
    return payload


def mutate(payload: bytes, rng: random.Random) -> bytearray:
    """One to three random changes: bits, bytes, cuts, insertions, copies, large lengths."""
    data = bytearray(payload)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data)) if data else 0
        match rng.randrange(6):
            case 0 if data:
                data[at] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[at] = rng.randrange(256)
            case 2:
                del data[at:]
            case 3:
                data[at:at] = rng.randbytes(rng.randint(1, 9))
            case 4:
                data[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2**31, 2**32 - 1, 2**62, 2**64 - 1]))
            case _:
                end = min(len(data), at + rng.randint(1, 64))
                data[at:at] = data[at:end]
    return data


def check(payload: bytes | bytearray, may_be_valid: bool = False) -> None:
    """Fail unless the payload is refused as it should be; a forged one may be another valid payload."""
    global _watching
    start = time.process_time()
    _watching = True
    try:
        experiences = Experience.deserialize_many(payload)
    except ExperienceFormatError:
        pass
    else:
        assert may_be_valid
        assert all(isinstance(experience, Experience) for experience in experiences)
    finally:
        _watching = False
    assert time.process_time() - start < SECONDS


def mutations(payload: bytes, seed: int, count: int) -> Iterator[bytearray]:
    rng = random.Random(seed)
    for _ in range(count):
        data = mutate(payload, rng)
        if data != payload:
            yield data


@pytest.fixture(autouse=True, scope="module")
def watch() -> None:
    Experience.deserialize_many(write_version_1(plain_sample()))  # what is imported late, is imported here
    Experience.deserialize_many(Experience.serialize_many(sample()))
    sys.addaudithook(_audit)


@pytest.fixture(autouse=True)
def nothing_runs_and_memory_stays_small() -> Iterator[None]:
    _events.clear()
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert _events == []
    assert peak < SLACK


def payload_of(version: int) -> bytes:
    """A payload of text (version 2), or one with pictures, which some experiences share (version 3)."""
    experiences = [experience for experience in sample() if version == 3 or experience.multi_modal_inputs is None]
    payload = Experience.serialize_many(experiences + pictured() if version == 3 else experiences)
    assert payload[4] == version
    return payload


@pytest.mark.parametrize("version", [2, 3])
def test_damaged_payloads_are_refused(version: int):
    for payload in mutations(payload_of(version), 0, PAYLOADS // 6):
        check(payload)


@pytest.mark.parametrize("version", [2, 3])
def test_forged_payloads_with_a_good_checksum_are_refused_or_valid(version: int):
    payload = payload_of(version)
    size = struct.unpack_from("<Q", payload, 8)[0]
    parts = {"tensors": payload[32 : 32 + size], "metadata": payload[32 + size :]}
    for part, content in parts.items():
        for mutated in mutations(content, 1, PAYLOADS // 12):
            tensors, metadata = (parts | {part: bytes(mutated)}).values()
            check(_forge(tensors, metadata, version), may_be_valid=True)


def test_mutated_version_1_payloads_are_refused_or_valid():
    payload = write_version_1(plain_sample())
    size = struct.unpack_from("<Q", payload, 5)[0]
    for data in mutations(payload, 2, PAYLOADS // 6):
        check(data, may_be_valid=True)
    for metadata in mutations(payload[21 : 21 + size], 3, PAYLOADS // 6):
        header = payload[:5] + struct.pack("<QQ", len(metadata), len(payload) - 21 - size)
        check(header + metadata + payload[21 + size :], may_be_valid=True)


def test_every_truncation_and_every_trailing_byte_is_refused():
    of_text = Experience.serialize_many(sample()[:1]), write_version_1(plain_sample()[:1])
    for payload in (*of_text, Experience.serialize_many(pictured())):
        for end in range(len(payload)):
            check(payload[:end])
        check(payload + b"\0")
        check(payload * 2)


@pytest.mark.parametrize("pictures", [None, {"pixels": torch.ones(3)}])
def test_every_flipped_byte_of_versions_2_and_3_is_refused(pictures: dict[str, torch.Tensor] | None):
    batch = [Experience(tokens=[1, 2], info={"a": (1, "b")}, multi_modal_inputs=pictures) for _ in range(2)]
    payload = Experience.serialize_many(batch)
    for at in range(len(payload)):
        damaged = bytearray(payload)
        damaged[at] ^= 0xFF
        check(damaged)


@pytest.mark.parametrize("written", [2, 3])
@pytest.mark.parametrize(
    ("version", "at_fault"),
    [(0, "version 2 or 3"), (1, "bytes"), (255, "version 2 or 3")],  # version 1 has another header
)
def test_other_versions_are_refused(written, version, at_fault):
    payload = bytearray(payload_of(written))
    payload[4] = version
    with pytest.raises(ExperienceFormatError, match=at_fault):
        Experience.deserialize_many(payload)
    with pytest.raises(ExperienceFormatError, match=at_fault):
        Experience.deserialize_many(seal(payload))


@pytest.mark.parametrize(("written", "claimed"), [(2, 3), (3, 2)])
def test_a_version_with_the_content_of_another_is_refused(written, claimed):
    payload = bytearray(payload_of(written))
    payload[4] = claimed
    with pytest.raises(ExperienceFormatError, match="checksum"):
        Experience.deserialize_many(payload)
    with pytest.raises(ExperienceFormatError, match="unexpected fields"):
        Experience.deserialize_many(seal(payload))


def _forge(tensors: bytes, metadata: bytes, version: int = 2) -> bytearray:
    head = struct.pack("<4sB3xQQQ", b"TRXP", version, len(tensors), len(metadata), 0)
    return seal(bytearray(head + tensors + metadata))


EMPTY = struct.pack("<Q", 8) + b"{}      "
COLUMNS = {f"eid.{name}": [] for name in ("batch", "task", "run", "step", "suffix")}
COLUMNS |= {"experience_type": [], "prompt_length": []}
ROWS = {name: [] for name in ("tokens", "chosen", "rejected", "logprobs", "token_level_reward", "advantages")}
ROWS |= {"returns": [], "action_mask": [], "teacher_logprobs": []}


def _metadata(count: object = 0, **changes: object) -> bytes:
    return msgpack.packb({"count": count, "columns": COLUMNS, "rows": ROWS} | changes) or b""


def _tensor(name: str, entry: str, data: bytes = b"") -> bytes:
    header = f'{{"{name}":{entry}}}'.encode()
    return struct.pack("<Q", len(header)) + header + data


ONE_EMPTY = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
FORGED = {
    "no metadata": (EMPTY, b""),
    "metadata is no table": (EMPTY, b"\x01"),
    "list of 2**32 items": (EMPTY, b"\xdd\xff\xff\xff\xff"),
    "nested lists of 2**16 items": (EMPTY, b"\xdd\x00\x00\xff\xff" * 13_000),
    "string of 2**32 bytes": (EMPTY, b"\xdb\xff\xff\xff\xff"),
    "deep nesting": (EMPTY, b"\x91" * 100_000),
    "deep maps": (EMPTY, b"\x81\x01" * 50_000),
    "trailing metadata": (EMPTY, _metadata() + b"\xc0"),
    "large count": (EMPTY, _metadata(2**62)),
    "negative count": (EMPTY, _metadata(-1)),
    "odd count": (EMPTY, _metadata("0")),
    "unknown field": (EMPTY, _metadata(secret=1)),
    "unknown column": (EMPTY, _metadata(columns=COLUMNS | {"other": []})),
    "missing columns": (EMPTY, _metadata(columns={})),
    "row without tokens": (EMPTY, _metadata(1, columns={n: ["single_turn" if "type" in n else 1] for n in COLUMNS})),
    "float tokens": (EMPTY, _metadata(rows=ROWS | {"tokens": [["float32", None, []]]})),
    "unknown dtype": (EMPTY, _metadata(rows=ROWS | {"logprobs": [["load", None, []]]})),
    "missing stream": (EMPTY, _metadata(rows=ROWS | {"logprobs": [["float32", None, []]]})),
    "row outside": (EMPTY, _metadata(rows=ROWS | {"logprobs": [["float32", [5], [1]]]})),
    "marker alone": (EMPTY, _metadata(x=msgpack.ExtType(1, b""))),
    "unknown marker": (EMPTY, _metadata(x=msgpack.ExtType(99, b""))),
    "marker with content": (EMPTY, _metadata(x=[msgpack.ExtType(1, b"x")])),
    "tensor of 2**62": (EMPTY, _metadata(x=[msgpack.ExtType(2, b""), "float32", [2**62]])),
    "tensor of shape 2**62 x 0": (
        _tensor("values.uint8", ONE_EMPTY),
        _metadata(x=[msgpack.ExtType(2, b""), "uint8", [2**62, 2**62, 0]]),
    ),
    "negative shape": (EMPTY, _metadata(x=[msgpack.ExtType(2, b""), "float32", [-1]])),
    "array of objects": (EMPTY, _metadata(x=[msgpack.ExtType(3, b""), "object", [1]])),
    "unhashable key": (EMPTY, b"\x81\x90\x01"),
    "no tensors": (b"", _metadata()),
    "tensor header of 2**62": (struct.pack("<Q", 2**62), _metadata()),
    "tensor header is no JSON": (struct.pack("<Q", 2) + b"{]", _metadata()),
    "deep tensor header": (struct.pack("<Q", 50_000) + b"[" * 50_000, _metadata()),
    "tensor after the end": (_tensor("a.uint8", '{"dtype":"U8","shape":[9],"data_offsets":[0,9]}'), _metadata()),
    "unused tensor": (_tensor("a.uint8", '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}', b"x"), _metadata()),
    "bytes of no tensor": (EMPTY + b"x", _metadata()),
    "negative tensor": (_tensor("a.uint8", '{"dtype":"U8","shape":[-1],"data_offsets":[0,-1]}'), _metadata()),
    "odd shape": (_tensor("a.uint8", '{"dtype":"U8","shape":"x","data_offsets":[0,0]}'), _metadata()),
    "not a number": (_tensor("a.uint8", '{"dtype":"U8","shape":[0],"data_offsets":[0,NaN]}'), _metadata()),
    "unknown tensor dtype": (_tensor("a.qint8", ONE_EMPTY), _metadata()),
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_content_is_refused(case):
    check(_forge(*FORGED[case]))


def test_the_forger_can_make_a_valid_payload():
    assert Experience.deserialize_many(_forge(EMPTY, _metadata())) == []


# -- forged references to pictures -------------------------------------------------------------------------------------


def _claims(**changes: object) -> bytearray:
    """A payload of two experiences that share a picture, with changed entries, and a good checksum."""
    payload = Experience.serialize_many(pictured()[:2])
    size = struct.unpack_from("<Q", payload, 8)[0]
    value = msgpack.unpackb(payload[32 + size :], strict_map_key=False)
    column = changes.pop("column", value["columns"]["multi_modal_inputs"])
    value["columns"]["multi_modal_inputs"] = column
    return _forge(payload[32 : 32 + size], msgpack.packb(value | changes) or b"", 3)


def _tensor_claim(*shape: int) -> list[object]:
    return [msgpack.ExtType(2, b""), "float32", [*shape]]


PLACES_CLAIM = [msgpack.ExtType(2, b""), "int64", [2]]
BOTH = {"pixels": 0, "picture_places": 1}
WRONG_REFERENCES: dict[str, dict[str, object]] = {
    "index beyond the dicts": {"column": [0, 1]},
    "negative index": {"column": [0, -1]},
    "huge index": {"column": [0, 2**63]},
    "boolean index": {"column": [0, False]},
    "index that is no number": {"column": [0, "0"]},
    "index that is a list": {"column": [0, [0]]},
    "dict in place of an index": {"column": [0, {}]},
    "too few indices": {"column": [0]},
    "indices that are a number": {"column": 0},
    "dict that no experience has": {"inputs": [BOTH, BOTH]},
    "no dicts": {"inputs": []},
    "dicts that are a dict": {"inputs": {0: BOTH}},
    "dict that is a list": {"inputs": [[0, 1]]},
    "name that is a number": {"inputs": [{0: 0, "picture_places": 1}]},
    "tensor beyond the tensors": {"inputs": [{"pixels": 0, "picture_places": 2}]},
    "negative tensor": {"inputs": [{"pixels": -1, "picture_places": 0}]},
    "tensor in place of its index": {"inputs": [{"pixels": None, "picture_places": 1}]},
    "dict within a dict": {"inputs": [{"pixels": BOTH, "picture_places": 1}]},
    "tensor that no dict has": {"inputs": [{"pixels": 0}]},
    "no tensors": {"tensors": []},
    "tensors that are one tensor": {"tensors": _tensor_claim(6)},
    "tensors that are a dict": {"tensors": {0: _tensor_claim(6), 1: PLACES_CLAIM}},
    "number in place of a tensor": {"tensors": [1, PLACES_CLAIM]},
    "list in place of a tensor": {"tensors": [[_tensor_claim(6)], PLACES_CLAIM]},
    "tensor of 2**62": {"tensors": [_tensor_claim(2**62), PLACES_CLAIM]},
    "tensor that lies elsewhere": {"tensors": ["0" * 32, PLACES_CLAIM]},
    "array in place of a tensor": {"tensors": [[msgpack.ExtType(3, b""), "float32", [6]], PLACES_CLAIM]},
    "unknown entry": {"more": []},
}


@pytest.mark.parametrize("case", WRONG_REFERENCES)
def test_forged_references_are_refused(case):
    check(_claims(**WRONG_REFERENCES[case]))


def test_the_forger_of_references_can_make_a_valid_payload():
    assert len(Experience.deserialize_many(_claims())) == 2


def test_a_missing_column_or_entry_of_version_3_is_refused():
    payload = Experience.serialize_many(pictured())
    size = struct.unpack_from("<Q", payload, 8)[0]
    for entry in ("inputs", "tensors", "multi_modal_inputs"):
        value = msgpack.unpackb(payload[32 + size :], strict_map_key=False)
        value["columns"].pop(entry, None)
        value.pop(entry, None)
        check(_forge(payload[32 : 32 + size], msgpack.packb(value) or b"", 3))


@pytest.mark.parametrize("at", [8, 16])
@pytest.mark.parametrize("length", [0, 2**31, 2**62, 2**64 - 1])
def test_wrong_lengths_are_refused(at, length):
    payload = bytearray(Experience.serialize_many(sample()))
    struct.pack_into("<Q", payload, at, length)
    check(payload)
    check(seal(payload))
    old = bytearray(write_version_1(plain_sample()))
    struct.pack_into("<Q", old, at - 3, length)
    check(old)


@pytest.mark.parametrize("data", [b"", b"T", b"TRXP", b"TRXP\x02", b"TRXP\x01", b"XXXX" * 20, pickle.dumps([1])])
def test_short_and_foreign_data_are_refused(data):
    check(data)
