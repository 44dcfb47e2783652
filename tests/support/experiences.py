"""Hypothesis strategies and samples of experiences; payloads of version 1 as Trinity-RFT lays them out."""

import pickle
import struct
from typing import Any

import numpy as np
import safetensors.torch
import torch
from hypothesis import strategies as st

from trinity_lightning.common.experience import EID, CustomField, Experience
from trinity_lightning.common.experience.payload import TORCH_DTYPES

FLOAT_DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
TOKEN_DTYPES = st.sampled_from([torch.int32, torch.int64, torch.uint8, torch.int16])
TEXT = st.text(max_size=8) | st.just("lone \ud800 surrogate")

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | TEXT
    | st.binary(max_size=8)
    | st.builds(np.float32, st.floats(width=32))
    | st.builds(np.int64, st.integers(-(2**63), 2**63 - 1))
)


ANY_TENSOR = st.builds(
    lambda shape, dtype, seed: torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    FLOAT_DTYPES | TOKEN_DTYPES | st.sampled_from([torch.bool, torch.complex64, torch.uint16]),
    st.integers(0, 99),
)
ARRAYS = st.builds(
    lambda shape, dtype: np.arange(int(np.prod(shape)), dtype=np.float64).reshape(shape).astype(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(["float32", "int16", "bool", "complex128", "uint64"]),
)
VALUES = st.recursive(
    SCALARS | ANY_TENSOR | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(TEXT | st.integers(-5, 5) | st.tuples(TEXT, st.integers(0, 3)), inner, max_size=3)
    ),
    max_leaves=6,
)
IDS = st.integers(0, 99) | TEXT
MESSAGES = st.none() | st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXT}, optional={"tool": VALUES}),
    max_size=2,
)


# Strategies are made once: making and checking them takes longer than drawing from them.
COUNTS = st.integers(0, 9)
LENGTHS = st.integers(1, 4)
KINDS = st.sampled_from(["single_turn", "multi_turn", "dpo", "truncated"])
FLOATS = {
    length: st.none()
    | st.builds(
        lambda values, dtype: torch.tensor(values, dtype=dtype),
        st.lists(st.floats(-10, 10) | st.just(float("nan")), min_size=length, max_size=length),
        FLOAT_DTYPES,
    )
    for length in range(5)
}
MASKS = {length: st.lists(st.booleans(), min_size=length, max_size=length) for length in range(5)}
FIELDS = st.fixed_dictionaries(
    {
        "eid": st.builds(EID, IDS, IDS, COUNTS, COUNTS),
        "reward": st.none() | st.floats(),
        "info": st.dictionaries(TEXT | st.integers(-9, 9), VALUES, max_size=3),
        "metrics": st.dictionaries(TEXT, st.floats(), max_size=2),
        "prompt_text": st.none() | TEXT,
        "messages": MESSAGES,
        "tools": MESSAGES,
        "multi_modal_inputs": st.none() | st.dictionaries(TEXT, ANY_TENSOR, max_size=2),
        "custom_fields": st.lists(st.builds(CustomField, TEXT, TEXT, FLOAT_DTYPES), max_size=2),
    }
)


@st.composite
def experiences(draw: st.DrawFn) -> Experience:
    """An experience of any type, with anything that fields may hold."""
    kind = draw(KINDS)
    prompt, response = draw(LENGTHS), draw(LENGTHS)
    length = prompt if kind in {"dpo", "truncated"} else prompt + response
    response = 0 if kind == "dpo" else response
    fields: dict[str, Any] = draw(FIELDS)
    fields |= {"tokens": torch.arange(length).to(draw(TOKEN_DTYPES)), "prompt_length": prompt}
    for name in ("logprobs", "advantages", "returns", "token_level_reward", "teacher_logprobs"):
        fields[name] = draw(FLOATS[response])
    if kind == "truncated":
        fields["logprobs"] = torch.zeros(response)
        fields["truncate_status"] = "prompt_truncated"
    if kind == "multi_turn":
        fields["action_mask"] = torch.tensor(draw(MASKS[response]))
    if kind == "dpo":
        fields |= {"chosen": [1, 2], "rejected": [3], "chosen_messages": draw(MESSAGES)}
    return Experience(**fields)


def _single_turn(eid: EID) -> Experience:
    return Experience(
        eid=eid,
        tokens=[1, 2, 3, 4, 5],
        prompt_length=2,
        logprobs=[-0.1, -0.2, float("nan")],
        reward=0.5,
        advantages=torch.ones(3, dtype=torch.bfloat16),
        truncate_status="response_truncated",
        info={"shape": (1, 2), 7: b"bytes", "tensor": torch.eye(2), "array": np.arange(3), "nan": float("nan")},
        metrics={"accuracy": 1.0},
        prompt_text="What?",
        response_text="That.",
        custom_fields=[CustomField("shape", "shapes", torch.int64)],
    )


def sample() -> list[Experience]:
    """A few experiences that use every field."""
    single = _single_turn(EID(batch=1, task="a", run=2, step=3))
    multi = Experience(
        tokens=torch.arange(6),
        prompt_length=2,
        action_mask=[True, True, False, True],
        messages=[{"role": "user", "content": "Hi", "tool_calls": [{"id": 1}]}],
        tools=[{"name": "calculator"}],
        multi_modal_inputs={"pixels": torch.rand(2, 3)},
    )
    pair = Experience(tokens=[1, 2], chosen=[3], rejected=[4, 5], chosen_messages=[{"role": "user", "content": "x"}])
    return [single, multi, pair]


def pictured(groups: int = 1, size: int = 3, pixels: int = 6) -> list[Experience]:
    """Groups of rollouts, each of a prompt with a picture, which are equal and not the same objects."""
    return [
        Experience(
            eid=EID(1, group, run, suffix="p"),
            tokens=[5, 9, 9, 10 + run, 2],
            prompt_length=3,
            logprobs=[-0.5, -1.0],
            reward=float(run),
            multi_modal_inputs={
                "pixels": torch.arange(float(pixels)) + group,
                "picture_places": torch.tensor([1, 2]),
            },
        )
        for group in range(groups)
        for run in range(size)
    ]


def fixed() -> list[Experience]:
    """The experiences of tests/common/experience/version_2.bin: every dtype and kind of value, and fixed ids."""
    chat = [{"role": "user", "content": "Hi", "tool_calls": [{"id": 1}]}]
    single = _single_turn(EID(1, "a", 2, 3, "s"))
    single.info |= {name: torch.tensor([[0, 1]]).to(TORCH_DTYPES[name]) for name in sorted(TORCH_DTYPES)}
    single.info |= {"scalar": np.float32(1.5), "lone": "a\ud800b", "nested": ({(1, "a"): [None, True, 2**64 - 1]},)}
    multi = Experience(
        eid=EID(1, 2, suffix="m"),
        tokens=torch.arange(6),
        prompt_length=2,
        action_mask=[True, True, False, True],
        teacher_logprobs=torch.tensor([0.0, -1.0, -2.0, -3.0]).double(),
        messages=chat,
        tools=[{"name": "calculator"}],
        multi_modal_inputs={"pixels": torch.arange(6.0).reshape(2, 3)},
    )
    pair = Experience(
        eid=EID("7/eval", 0, suffix="p"), tokens=[1, 2], chosen=[3], rejected=[4, 5], chosen_messages=chat
    )
    cut = Experience(
        eid=EID(suffix="c"), tokens=[1, 2], prompt_length=2, logprobs=[0.0], truncate_status="prompt_truncated"
    )
    return [single, multi, pair, cut]


TENSORS = ["tokens", "logprobs", "token_level_reward", "advantages", "returns", "action_mask", "chosen", "rejected"]
PLAIN = ["reward", "truncate_status", "info", "metrics", "prompt_length", "response_text", "prompt_text", "messages"]
PLAIN += ["tools", "chosen_messages", "rejected_messages"]


def frame(metadata: bytes, tensors: bytes) -> bytes:
    return b"TRXP" + struct.pack("<BQQ", 1, len(metadata), len(tensors)) + metadata + tensors


def write_version_1(experiences: list[Experience], protocol: int = pickle.HIGHEST_PROTOCOL, **changes: Any) -> bytes:
    items, tensors = [], {}
    for index, experience in enumerate(experiences):
        item = {"eid": experience.eid.to_dict(), **{name: getattr(experience, name) for name in PLAIN}}
        item["custom_fields"] = [
            {"source_field": f.source_field, "destination_field": f.destination_field, "data_type": str(f.data_type)}
            for f in experience.custom_fields
        ]
        inputs = experience.multi_modal_inputs or {}
        item["multi_modal_input_keys"] = list(inputs)
        tensors |= {f"{index}:{n}": t for n in TENSORS if (t := getattr(experience, n)) is not None}
        tensors |= {f"{index}:multi_modal_inputs:{key}": value for key, value in inputs.items()}
        items.append(item)
    metadata = {"version": 1, "num_items": len(items), "items": items} | changes
    return frame(pickle.dumps(metadata, protocol=protocol), safetensors.torch.save(tensors))


def plain_sample() -> list[Experience]:
    single, multi, pair = sample()
    single.info = {"shape": (1, 2), 7: b"bytes", "long": 10**30, "nested": [{"a": None}, True, ()], "text": "é" * 300}
    return [single, multi, pair]
