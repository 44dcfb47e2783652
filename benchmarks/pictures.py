"""Pictures computed once a group: a training step against the padded layout with a tower for each row.

    python benchmarks/pictures.py [--groups 4] [--rows 8] [--rounds 9] [--dtype auto]

A random Idefics3 is made on the spot, in which the tower weighs as much as in SmolVLM-256M: 5M weights that read a
picture of 256 x 256 pixels as 256 patches, and 9M of a language model that has 16 tokens for it. Each group has a
picture, a prompt of 32 tokens (and the picture's), and responses of 8 to 32 tokens, all with an advantage.

`ours` shares each group's prompt, and its tower computes each different picture of a micro-batch once; `padded` does
only the latter; in `per_row` the rows are padded, and each has a picture of its own, which differs from the group's
others in one value, as if rows were computed one beside the other. Each side is a process of its own, and they take
turns, after a step to warm up. The norms of the gradients must agree. Prints one JSON line: seconds a step (median,
least, largest), peak memory and what of it training adds to the loaded model (gradients, optimizer and activations),
and the ratios of `per_row` to `ours` and `padded`, by the least seconds.
"""

import argparse
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _turns import Requests, Side, peak_gb, spread, steps_on_request, take_turns

ENVIRONMENT = dict(os.environ)
SIDES = {"ours": "shared_prefix", "padded": "padded", "per_row": "padded"}  # and their layouts
PICTURE, PICTURE_TOKENS, EDGE = 4, 16, 256  # the token of pictures, how many a picture has, and pixels of its edge
PROMPT, VOCABULARY = 32, 4096
# Largest difference of gradient norms, as a share: products in 16 bits round.
TOLERANCE = {"fp32": 1e-3, "bf16": 0.05}


# -- the processes that train -----------------------------------------------------------------------------------------


def work(spec: dict[str, Any]) -> None:
    """Take a step a request, and report the memory at any other."""
    import lightning as L
    from _training import fit

    from trinity_lightning.config.algorithm import AlgorithmConfig
    from trinity_lightning.monitor.machine import resident_gb

    requests = Requests()
    warnings.simplefilter("ignore")
    norms: list[float] = []
    loaded = 0.0

    def batches() -> Iterator[Any]:
        nonlocal loaded
        batch, loaded = make_batch(spec["groups"], spec["rows"], alike=spec["side"] != "per_row"), resident_gb()
        yield from steps_on_request(requests, batch, lambda: norms[0])

    class Look(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            norms.append(float(trainer.callback_metrics["actor/grad_norm"]))

    algorithm = AlgorithmConfig(layout=SIDES[spec["side"]])  # type: ignore[arg-type]
    fit(spec["model"], batches(), spec["dtype"], algorithm, [Look()], compile_layers=False)
    requests.answer({"peak": peak_gb(), "training": peak_gb() - loaded})


def make_batch(groups: int, rows: int, alike: bool) -> Any:
    """Groups of rollouts on one picture; not `alike`: each row's picture differs in one value."""
    import torch

    from trinity_lightning.common.experience import EID, Experience
    from trinity_lightning.common.optimizer_batch import OptimizerBatch
    from trinity_lightning.common.pictures.prompt import PLACES

    generator = torch.Generator().manual_seed(0)
    experiences = []
    for task in range(groups):
        text = torch.randint(5, VOCABULARY, (PROMPT,), generator=generator)
        prompt = torch.cat([text[:4], torch.full((PICTURE_TOKENS,), PICTURE), text[4:]])
        inputs = {
            "pixel_values": torch.rand(1, 3, EDGE, EDGE, generator=generator) * 2 - 1,
            "pixel_attention_mask": torch.ones(1, EDGE, EDGE, dtype=torch.bool),
            PLACES: torch.arange(4, 4 + PICTURE_TOKENS),
        }
        for run in range(rows):
            response = torch.randint(5, VOCABULARY, (8 + run % 4 * 8,), generator=generator)
            if not alike:
                inputs = inputs | {"pixel_values": inputs["pixel_values"].clone()}
                inputs["pixel_values"][0, 0, 0, 0] += 0.01
            experiences.append(
                Experience(
                    eid=EID(batch=1, task=task, run=run),
                    tokens=torch.cat([prompt, response]),
                    prompt_length=len(prompt),
                    advantages=torch.full((len(response),), float(run % 2 * 2 - 1)),
                    multi_modal_inputs=inputs,
                )
            )
    return OptimizerBatch.of(experiences, explore_step=1)


# -- the process that measures ----------------------------------------------------------------------------------------


def write_model(folder: Path) -> str:
    """A random Idefics3 without tokenizer and processor, which training does not need."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    tower = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4}
    language = {"hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 6, "num_attention_heads": 5}
    language |= {"num_key_value_heads": 5, "head_dim": 64, "vocab_size": VOCABULARY, "model_type": "llama"}
    special: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    config = Idefics3Config(
        vision_config=tower | {"image_size": EDGE, "patch_size": 16},
        text_config=language | special | {"tie_word_embeddings": True},
        image_token_id=PICTURE,
        scale_factor=4,
        tie_word_embeddings=True,
        **special,
    )
    torch.manual_seed(0)
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    return str(folder)


def compare(spec: dict[str, Any], rounds: int) -> dict[str, Any]:
    sides = {name: Side([__file__, "--work", json.dumps(spec | {"side": name})], ENVIRONMENT) for name in SIDES}
    try:
        norms = {name: side.answer() for name, side in sides.items()}
        taken = take_turns(sides, seconds=0.0, rounds=rounds)
        memory = {name: side.ask("end") for name, side in sides.items()}
    finally:
        for side in sides.values():
            side.close()
    if max(norms.values()) > (1 + TOLERANCE[spec["dtype"]]) * min(norms.values()):
        raise SystemExit(f"the sides compute different gradients: their norms are {norms}.")
    seconds = {name: min(values) for name, values in taken.items()}
    return {
        "seconds": {name: spread(values) for name, values in taken.items()},
        "ratio": round(seconds["per_row"] / seconds["ours"], 2),
        "padded_ratio": round(seconds["per_row"] / seconds["padded"], 2),
        "peak_gb": {name: round(gb["peak"], 2) for name, gb in memory.items()},
        "training_gb": {name: round(gb["training"], 2) for name, gb in memory.items()},
        "memory_ratio": round(memory["per_row"]["training"] / memory["ours"]["training"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", choices=["auto", "bf16", "fp32"], default="auto", help="auto: the faster one here")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(json.loads(args.work))
        return
    import trinity_lightning  # noqa: F401  first: torch and OpenMP read what it sets when they are loaded

    # isort: split
    from trinity_lightning.common.hardware import faster_dtype

    dtype = faster_dtype().value if args.dtype == "auto" else args.dtype
    with tempfile.TemporaryDirectory() as folder:
        spec = {"model": write_model(Path(folder)), "groups": args.groups, "rows": args.rows, "dtype": dtype}
        results = compare(spec, args.rounds)
    settings = {"groups": args.groups, "rows": args.rows, "dtype": dtype, "cores": os.cpu_count()}
    print(json.dumps({"benchmark": "pictures", **settings, **results}))


if __name__ == "__main__":
    main()
