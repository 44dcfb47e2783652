"""Payloads of version 1 and plain pickles are read; nothing that a forged one names is run."""

import io
import pickle
import pickletools
import struct
from typing import Any

import pytest
import safetensors.torch
import torch
from support.experiences import frame, plain_sample, sample, write_version_1

from trinity_lightning.common.experience import CustomField, Experience, ExperienceFormatError
from trinity_lightning.common.experience.legacy import load_plain


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_version_1_is_read(protocol):
    batch = plain_sample()
    assert Experience.deserialize_many(write_version_1(batch, protocol)) == batch


def test_truncated_prompts_read_as_single_turns():
    cut = Experience(tokens=[1, 2], prompt_length=2, logprobs=[0.0], truncate_status="prompt_truncated")
    assert Experience.deserialize(write_version_1([cut])) == cut


def test_a_partial_mask_reads_as_several_turns():
    multi = Experience(tokens=[1, 2, 3], action_mask=[True, False])
    assert Experience.deserialize(write_version_1([multi])).experience_type == "multi_turn"


def test_version_1_written_again_is_version_2_or_with_multi_modal_inputs_3():
    batch = Experience.deserialize_many(write_version_1(plain_sample()[1:]))
    assert Experience.serialize_many(batch)[4] == 3
    assert Experience.serialize_many(batch[1:])[4] == 2


def test_equal_pictures_of_version_1_are_read_as_one():
    pictures = [torch.arange(6.0), torch.arange(6.0), torch.ones(6)]
    batch = [Experience(tokens=[1, 2, 3], multi_modal_inputs={"pixels": picture}) for picture in pictures]
    again = Experience.deserialize_many(write_version_1(batch))
    assert again == batch
    first, twin, other = (experience.multi_modal_inputs for experience in again)
    assert first is twin
    assert first is not other


class Bomb:
    fired = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (Bomb, "fired", True)


REFUSED = {
    "call": (Bomb(), r"builtins\.setattr"),
    "class": (Experience, r"trinity_lightning\.common\.experience\.experience\.Experience"),
    "set": ({1}, "EMPTY_SET"),
    "complex": (1j, r"builtins\.complex"),
    "tensor": (torch.ones(1), r"torch\._utils\._rebuild_tensor_v2"),
    "field": (CustomField("a", "b", torch.int8), r"fields\.CustomField|copyreg"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_objects_are_refused_by_name_and_nothing_runs(case, protocol):
    value, name = REFUSED[case]
    if protocol == 2:
        name = "not plain data"
    experience = Experience(tokens=[1, 2], info={"x": value})
    with pytest.raises(ExperienceFormatError, match=name):
        Experience.deserialize(write_version_1([experience], protocol))
    assert not Bomb.fired


CALLING = ["REDUCE", "BUILD", "NEWOBJ", "NEWOBJ_EX", "OBJ", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"]


@pytest.mark.parametrize("name", [*CALLING, "NEXT_BUFFER", "READONLY_BUFFER"])
def test_opcodes_that_make_or_call_objects_are_refused(name):
    code = next(opcode.code for opcode in pickletools.opcodes if opcode.name == name)
    with pytest.raises(ExperienceFormatError, match=name):
        load_plain(b"\x80\x05NN" + code.encode("latin-1") + b"\x01\n.")


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def _laughs() -> list[Any]:
    value: list[Any] = ["ha"] * 10
    for _ in range(30):
        value = [value] * 10
    return value


def _cycle() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def _chains(count: int) -> list[Any]:
    """Chains of 90 lists side by side, each of which ends in the one before it."""
    chains: list[Any] = []
    value: list[Any] = []
    for _ in range(count):
        for _ in range(90):
            value = [value]
        chains.append(value)
    return chains


def _wide_key() -> dict[Any, None]:
    return {tuple(range(200)): None}


@pytest.mark.parametrize("value", [_nested(200), _chains(2), _laughs(), _cycle(), _wide_key()])
def test_limits_of_depth_and_size(value):
    with pytest.raises(ExperienceFormatError, match=r"^metadata: "):
        load_plain(pickle.dumps(value))


def test_what_is_nested_100_deep_or_has_tuples_as_keys_is_read():
    value = [_nested(98), {(1, ("a", 2)): _nested(50)}]
    assert load_plain(pickle.dumps(value)) == value


# In another process: the hash of such a key overruns the stack, or takes 2**80 steps.
@pytest.mark.parametrize("key", ["b')' + b'\\x85' * 1_000_000", "b')' + b'q\\x00h\\x00\\x86' * 80"])
@pytest.mark.parametrize("item", ["b'}' + KEY + b'Ns.'", "b'}(' + KEY + b'Nu.'"])
def test_keys_that_cannot_be_hashed_are_refused_and_nothing_dies(key, item, run_train, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from trinity_lightning.common.experience.legacy import ExperienceFormatError, load_plain\n"
        f"try:\n    load_plain({item.replace('KEY', key)})\n"
        "except ExperienceFormatError as error:\n    print('refused:', error)\n"
    )
    done = run_train(tmp_path, program=str(script), timeout=60)
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("refused: ")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x05.",
        b"\x80\x05N",
        b"\x80\x05NN.",
        b"\x80\x05N.N",
        b"\x80\x05]\x8e" + struct.pack("<Q", 2**62) + b".",
        b"\x80\x05\x96" + struct.pack("<Q", 2**62) + b".",
        b"\x80\x05Nr\xff\xff\xff\xffj\xff\xff\xff\xff.",
        b"\x80\x05h\x09.",
        b"\x80\x05(]Nu.",
        b"\x80\x05}(Nu.",
        b"\x80\x05}(]Nu.",
        b"\x80\x05e.",
        b"\x80\x05\x86.",
        b"cos\nsystem\n.",
        b"\x80\x05(.",
        b"\x80\x05Va\n.",
        b"\xff",
    ],
)
def test_broken_pickles_are_refused(data):
    with pytest.raises(ExperienceFormatError, match=r"^metadata: "):
        load_plain(data)


UNKNOWN_DTYPE = {"source_field": "", "destination_field": "", "data_type": "torch.load"}


@pytest.mark.parametrize(
    ("changes", "at_fault"),
    [
        ({"num_items": 2}, "2 items"),
        ({"version": 3}, "items"),
        ({"items": None}, "NoneType"),
        ({"items": [], "num_items": 0}, "'0:tokens'"),
        ({"items": [{"prompt_length": 5}]}, "prompt_length"),
        ({"items": [{"multi_modal_input_keys": ["x"]}]}, "'0:multi_modal_inputs:x'"),
        ({"items": [{"custom_fields": [UNKNOWN_DTYPE]}]}, "'load'"),
    ],
)
def test_metadata_that_do_not_fit_are_refused(changes, at_fault):
    with pytest.raises(ExperienceFormatError, match=at_fault):
        Experience.deserialize_many(write_version_1([Experience(tokens=[1, 2])], **changes))


def test_tensors_of_unknown_fields_are_refused_by_name():
    metadata = pickle.dumps({"version": 1, "num_items": 0, "items": []})
    tensors = safetensors.torch.save({"0:routed_experts": torch.ones(1)})
    with pytest.raises(ExperienceFormatError, match="0:routed_experts"):
        Experience.deserialize_many(frame(metadata, tensors))


def test_plain_pickles_are_read_only_on_request():
    batch = sample()
    data = pickle.dumps(batch)
    with pytest.raises(ExperienceFormatError, match="allow_pickle=True"):
        Experience.deserialize_many(data)
    assert Experience.deserialize_many(data, allow_pickle=True) == batch
    assert Experience.deserialize(pickle.dumps(batch[0]), allow_pickle=True) == batch[0]


@pytest.mark.parametrize(
    "modules",
    [{b"EID": b"eid", b"CustomField": b"custom_field"}, dict.fromkeys([b"EID", b"CustomField"], b"experience")],
)
def test_plain_pickles_name_classes_where_they_were(modules):
    experience, package = Experience(tokens=[1, 2], custom_fields=[CustomField("a", "b", torch.int8)]), b"experience."
    data = pickle.dumps(experience, protocol=2)
    for name, module in modules.items():
        assert package + b"fields\n" + name in data
        data = data.replace(package + b"fields\n" + name, package + module + b"\n" + name)
    assert Experience.deserialize(data, allow_pickle=True) == experience


@pytest.mark.parametrize(
    ("data", "content"),
    [
        (pickle.dumps({"a": 1}), "dict"),
        (pickle.dumps([1]), "int"),
        (b"", "EOFError"),
        (b"no pickle", "UnpicklingError"),
        (pickle.dumps(io.BytesIO), "type"),
    ],
)
def test_pickles_of_other_things_are_refused(data, content):
    with pytest.raises(ExperienceFormatError, match=rf"\b{content}\b"):
        Experience.deserialize_many(data, allow_pickle=True)
