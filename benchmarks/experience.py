"""Serialization and collation of experiences against the plain way: one named tensor a field an experience.

    python benchmarks/experience.py [--sizes 2048x1024 64x256 8x32768] [--pictures 512x64x224] [--seconds 4]

The plain way, Trinity-RFT's, packs a safetensors entry a field an experience beside pickled metadata (copies of tensors
that share memory, which safetensors refuses), and collates with a torch.cat a row and a torch.stack. Both sides run in
turns in one process on one thread for so many seconds; the fastest run of each counts. A size is experiences x tokens,
a quarter of them prompt. Prints one JSON line with milliseconds of both sides and their ratio, by size; and, of the
first size, the peak of memory while serializing over the payload's size.

`--pictures` is experiences x prompts x pixels a side: the rollouts of a prompt share a picture, three float32 numbers a
pixel. Against the payload, which has each picture once, stands the way of version 2: the tensors of every experience.
"""

import argparse
import copy
import json
import pickle
import resource
import struct
import time
from collections.abc import Callable
from typing import Any

import psutil
import safetensors.torch
import torch
from torch import Tensor

from trinity_lightning.common.experience import (
    EID,
    Experience,
    gather_action_masks,
    gather_attention_masks,
    gather_response_attrs,
    gather_token_ids,
)
from trinity_lightning.common.experience.payload import Writer, unpack

TENSOR_FIELDS = ("tokens", "logprobs", "advantages", "action_mask")
PLAIN_FIELDS = ("reward", "info", "metrics", "prompt_length", "prompt_text", "response_text", "truncate_status")
PLAIN_FIELDS += ("messages", "tools", "chosen_messages", "rejected_messages")
LENGTHS = struct.Struct("<QQ")


def make_experiences(count: int, tokens: int, prompt: int) -> list[Experience]:
    """Single turns of equal length with log-probabilities and advantages."""
    generator = torch.Generator().manual_seed(0)
    return [
        Experience(
            eid=EID(batch=1, task=index // 8, run=index % 8),
            tokens=torch.randint(0, 50_000, (tokens,), dtype=torch.int32, generator=generator),
            prompt_length=prompt,
            logprobs=torch.randn(tokens - prompt, generator=generator),
            advantages=torch.randn(tokens - prompt, generator=generator),
            reward=float(index % 2),
            info={"model_version": 1, "finish_reason": "stop"},
            metrics={"accuracy": float(index % 2)},
            prompt_text="What is 2 + 2? ",
            response_text="It is 4. " * 20,
        )
        for index in range(count)
    ]


def plain_serialize(experiences: list[Experience]) -> bytes:
    tensors, items, storages = {}, [], set()
    for index, experience in enumerate(experiences):
        items.append({"eid": experience.eid.to_dict(), **{name: getattr(experience, name) for name in PLAIN_FIELDS}})
        for name in TENSOR_FIELDS:
            tensor = getattr(experience, name).detach().contiguous().cpu()
            storage = tensor.untyped_storage().data_ptr()
            tensors[f"{index}:{name}"] = tensor.clone() if storage in storages else tensor
            storages.add(storage)
    metadata, data = pickle.dumps(items, protocol=pickle.HIGHEST_PROTOCOL), safetensors.torch.save(tensors)
    return LENGTHS.pack(len(metadata), len(data)) + metadata + data


def plain_deserialize(payload: bytes) -> list[Experience]:
    size = LENGTHS.unpack_from(payload)[0]
    items = pickle.loads(payload[LENGTHS.size : LENGTHS.size + size])  # noqa: S301  # written above
    tensors = safetensors.torch.load(payload[LENGTHS.size + size :])
    for index, item in enumerate(items):
        item.update({name: tensors[f"{index}:{name}"] for name in TENSOR_FIELDS})
    return [Experience(**item) for item in items]


def plain_gather(experiences: list[Experience], prompt: int, response: int) -> list[Tensor]:
    def right(name: str) -> Tensor:
        rows = [getattr(e, name) for e in experiences]
        return torch.stack([torch.cat([r, torch.full((response - len(r),), 0, dtype=r.dtype)]) for r in rows])

    tokens = []
    attention = torch.zeros((len(experiences), prompt + response), dtype=torch.bool)
    for index, e in enumerate(experiences):
        before, after = prompt - e.prompt_length, response + e.prompt_length - len(e.tokens)
        pads = [torch.full((size,), 0, dtype=e.tokens.dtype) for size in (before, after)]
        tokens.append(torch.cat([pads[0], e.tokens, pads[1]]))
        attention[index, before : before + len(e.tokens)] = True
    return [torch.stack(tokens), attention, right("action_mask"), right("logprobs")]


def flat_gather(experiences: list[Experience], prompt: int, response: int) -> list[Tensor]:
    return [
        gather_token_ids(experiences, prompt, response, 0),
        gather_attention_masks(experiences, prompt, response),
        gather_action_masks(experiences, response),
        gather_response_attrs(experiences, "logprobs", response),
    ]


def fastest(*sides: Callable[[], Any], seconds: float) -> list[float]:
    """Milliseconds of the fastest run of each side; the sides take turns, so that both meet the same neighbours."""
    best = [float("inf")] * len(sides)
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or best[0] == float("inf"):
        for side, run in enumerate(sides):
            start = time.perf_counter()
            result = run()
            best[side] = min(best[side], (time.perf_counter() - start) * 1e3)
            del result
    return best


def peak_over_payload(experiences: list[Experience]) -> float:
    """Growth of the process's peak memory while serializing, the payload itself included, over the payload's size."""
    Experience.serialize_many(experiences[:1])  # imports
    before = psutil.Process().memory_info().rss
    payload = Experience.serialize_many(experiences)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return round((peak - before) / len(payload), 3)


def compare(experiences: list[Experience], prompt: int, response: int, seconds: float) -> dict[str, Any]:
    """Milliseconds of both sides and their ratio, by what is done."""
    plain, ours = plain_serialize(experiences), Experience.serialize_many(experiences)
    pairs = {
        "serialize": (lambda: plain_serialize(experiences), lambda: Experience.serialize_many(experiences)),
        "deserialize": (lambda: plain_deserialize(plain), lambda: Experience.deserialize_many(ours)),
        "gather": (
            lambda: plain_gather(experiences, prompt, response),
            lambda: flat_gather(experiences, prompt, response),
        ),
    }
    result: dict[str, Any] = {"payload_mb": round(len(ours) / 1e6, 1)}
    for name, sides in pairs.items():
        plain_ms, our_ms = fastest(*sides, seconds=seconds)
        result[name] = {"plain_ms": round(plain_ms, 2), "ms": round(our_ms, 2), "ratio": round(plain_ms / our_ms, 2)}
    return result


# -- pictures ----------------------------------------------------------------------------------------------------------


def make_pictured(count: int, prompts: int, side: int) -> list[Experience]:
    """Experiences of 1,024 tokens, a quarter of them prompt; those of a prompt follow each other."""
    experiences = make_experiences(count, 1024, 256)
    pictures = [torch.randn(1, 3, side, side) for _ in range(prompts)]
    inputs = [{"pixel_values": picture, "picture_places": torch.arange(64)} for picture in pictures]
    for index, experience in enumerate(experiences):
        experience.multi_modal_inputs = inputs[index * prompts // count]
    return experiences


def version_2_serialize(experiences: list[Experience]) -> tuple[bytes, bytes]:
    text = [copy.copy(experience) for experience in experiences]
    for experience in text:
        experience.multi_modal_inputs = None
    inputs = [experience.multi_modal_inputs for experience in experiences]
    return Experience.serialize_many(text), Writer().pack(inputs)


def version_2_deserialize(text: bytes, inputs: bytes) -> list[Experience]:
    experiences = Experience.deserialize_many(text)
    for experience, of_one in zip(experiences, unpack(memoryview(inputs)), strict=True):
        experience.multi_modal_inputs = of_one
    return experiences


def compare_pictures(experiences: list[Experience], seconds: float) -> dict[str, Any]:
    """Megabytes, and milliseconds, of both ways."""
    before, ours = version_2_serialize(experiences), Experience.serialize_many(experiences)
    pairs = {
        "serialize": (lambda: version_2_serialize(experiences), lambda: Experience.serialize_many(experiences)),
        "deserialize": (lambda: version_2_deserialize(*before), lambda: Experience.deserialize_many(ours)),
    }
    result: dict[str, Any] = {
        "version_2_mb": round(sum(map(len, before)) / 1e6, 1),
        "payload_mb": round(len(ours) / 1e6, 1),
    }
    for name, sides in pairs.items():
        before_ms, our_ms = fastest(*sides, seconds=seconds)
        result[name] = {
            "version_2_ms": round(before_ms, 2),
            "ms": round(our_ms, 2),
            "ratio": round(before_ms / our_ms, 2),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["2048x1024", "64x256", "8x32768"])
    parser.add_argument("--pictures", nargs="*", default=["512x64x224"])
    parser.add_argument("--seconds", type=float, default=4.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"benchmark": "experience", "seconds": args.seconds}
    for size in args.sizes:
        count, tokens = map(int, size.split("x"))
        prompt = tokens // 4
        experiences = make_experiences(count, tokens, prompt)
        if "peak_over_payload" not in result:  # the process has one peak, so that only the first can be seen
            result["peak_over_payload"] = peak_over_payload(experiences)
        result[size] = compare(experiences, prompt, tokens - prompt, args.seconds)
    for size in args.pictures:
        result[f"pictures {size}"] = compare_pictures(make_pictured(*map(int, size.split("x"))), args.seconds)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
