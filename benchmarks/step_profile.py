"""Where the time of a training step goes: torch's profiler over one step of each case of `vs_trl.py`, by kind of work.

    python benchmarks/step_profile.py [--model smollm2] [--cases short] [--tokens 512] [--compile]

One JSON line a case: `seconds` of the step and, of each kind of work, `share`: all shares make 1, and what no operator
took is Python's and Lightning's. A product with a weight is one wherever it stands, so that `head` is all the rest of
it; those of attention are in `attention`. `products` are the shapes that took most, T being the tokens of a
micro-batch: their share, and the speed that they ran at as a share of `peak_tflops`, the best product's. `mfu` is
`perf/mfu` of a step without the profiler, and `ceiling` what it would be if products took as long as they do, and all
else no time.
"""

import argparse
import json
import math
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from _rollouts import CASES, Rollout
from _turns import clock

import trinity_lightning  # noqa: F401  before torch, which reads what it sets

# isort: split
from torch._C._autograd import DeviceType

Groups = Sequence[Sequence[Rollout]]

GROUPS, GROUP_SIZE = 8, 8
WARM_UP = 2  # steps
SHAPES = 8  # of products, in the line
PRODUCTS = ("aten::mm", "aten::addmm")  # attention has others
OPTIMIZER, CLIPPING, ACCUMULATION, COPIES = "optimizer", "norm and clipping", "gradients into float32", "copies, casts"
FLEX_ATTENTION = ("flex_attention", "triton_tem_fused")  # on a GPU
WAITS, OUTSIDE = "Python and Lightning", "kernels of no operator"
# The kind of everything that an event with such a name takes or calls, the first that fits.
KINDS = (
    (OPTIMIZER, ("Optimizer.",)),
    (CLIPPING, ("aten::_foreach",)),
    (ACCUMULATION, ("torch::autograd::AccumulateGrad",)),
    ("attention", ("_Attention", "aten::_scaled_dot_product", "aten::scaled_dot_product", *FLEX_ATTENTION)),
    ("head", ("_LogSoftmax", "Projection", "_Lookup")),
    (COPIES, ("aten::copy_", "aten::_to_copy", "aten::clone", "aten::cat")),
)
ENGINE = "autograd::engine::evaluate_function"


def kind_of(event: Any) -> str:
    """The kind of work of an event's own time."""
    if event.name in PRODUCTS:
        return "products"
    names = [caller.name for caller in lineage(event)]
    for kind, beginnings in KINDS:
        if any(name.startswith(beginnings) for name in names):
            cast = kind == COPIES and event.cpu_parent is not None and is_for_accumulation(event)
            return ACCUMULATION if cast else kind
    return "element-wise and the rest"


def lineage(event: Any) -> Iterator[Any]:
    """The event, what called it, and so on."""
    while event is not None:
        yield event
        event = event.cpu_parent


def is_for_accumulation(copy: Any) -> bool:
    """True if autograd's engine made this cast: to the dtype that gradients are kept in."""
    outermost = next(
        caller for caller in lineage(copy) if caller.cpu_parent is None or ENGINE in caller.cpu_parent.name
    )
    return outermost.name == "aten::to" and outermost.cpu_parent is not None


def factors(product: Any) -> list[list[int]]:
    """The shapes of the two matrices; a bias and numbers stand beside them."""
    return [shape for shape in product.input_shapes if len(shape) == 2][-2:]


def shape_of(product: Any, sizes: set[int]) -> str:
    """Its rows, inner dimension and columns, T in place of what is no size of a weight."""
    (rows, inner), (_, columns) = factors(product)
    if any(caller.name.startswith("Projection") for caller in lineage(product)):
        return "head"
    return " x ".join(str(size) if size in sizes else "T" for size in (rows, inner, columns))


def operations(product: Any) -> int:
    """Floating-point operations of a product of two matrices."""
    left, right = factors(product)
    return 2 * math.prod(left) * right[-1]


def summary(events: Sequence[Any], sizes: set[int], seconds: float, peak: float, gpu: bool = False) -> dict[str, Any]:
    """Shares of the kinds of work and of the products' shapes; on a GPU its kernels count, by what launched them."""
    kinds: dict[str, float] = defaultdict(float)
    shapes: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    on_gpu = [event for event in events if event.device_type != DeviceType.CPU and not event.is_user_annotation]
    for event in (event for event in events if event.device_type == DeviceType.CPU):
        event_seconds = (event.self_device_time_total if gpu else event.self_cpu_time_total) / 1e6
        kinds[kind_of(event)] += event_seconds
        if event.name in PRODUCTS:
            shape = shapes[shape_of(event, sizes)]
            shape[0], shape[1] = shape[0] + event_seconds, shape[1] + operations(event)
    if gpu:
        kinds[OUTSIDE] = sum(kernel.self_device_time_total for kernel in on_gpu) / 1e6 - sum(kinds.values())
    kinds[WAITS] = seconds - sum(kinds.values())
    most = sorted(shapes.items(), key=lambda item: -item[1][0])[:SHAPES]
    return {
        "share": {
            kind: round(kind_seconds / seconds, 3)
            for kind, kind_seconds in sorted(kinds.items(), key=lambda item: -item[1])
        },
        "products": {
            shape: {"share": round(kind_seconds / seconds, 3), "of_peak": round(flops / kind_seconds / peak, 2)}
            for shape, (kind_seconds, flops) in most
        },
        "products_s": kinds["products"],
    }


def measure(
    model: str, groups: Groups, dtype: str, tokens: int | str, compile_layers: bool, accelerator: str = "cpu"
) -> dict[str, Any]:
    """The printed results of a step over these rollouts."""
    import lightning as L
    from _training import batch_of, fit
    from torch.profiler import ProfilerActivity, profile

    from trinity_lightning.config.algorithm import AlgorithmConfig
    from trinity_lightning.trainer.flops import peak_flops

    batch, gpu = batch_of(groups), accelerator == "gpu"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    seen: dict[str, Any] = {}

    class Look(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen["sizes"] = {size for weight in pl_module.policy.parameters() for size in weight.shape}
            seen["peak"] = peak_flops(pl_module.device, pl_module.policy.dtype)
            if batch_idx == WARM_UP:
                seen.update({name: float(trainer.callback_metrics[name]) for name in ("perf/mfu", "time/train")})

    def steps() -> Iterator[Any]:
        for _ in range(WARM_UP + 1):
            yield batch
        with profile(activities=activities, record_shapes=True) as seen["profile"]:
            start = clock()
            yield batch
            seen["seconds"] = clock() - start

    algorithm = AlgorithmConfig(max_tokens_per_micro_batch=tokens)
    fit(model, steps(), dtype, algorithm, [Look()], accelerator, compile_layers)
    results = summary(seen["profile"].events(), seen["sizes"], seen["seconds"], seen["peak"], gpu)
    ceiling = seen["perf/mfu"] * seen["time/train"] / results.pop("products_s")
    numbers = {"seconds": seen["seconds"], "mfu": seen["perf/mfu"], "ceiling": ceiling}
    numbers["peak_tflops"] = seen["peak"] / 1e12
    return {name: round(value, 3) for name, value in numbers.items()} | results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["short"])
    parser.add_argument("--tokens", type=int, default=512, help="of a micro-batch; +recipe=grpo has 512")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")

    from transformers import AutoConfig

    from trinity_lightning.common.hardware import faster_dtype
    from trinity_lightning.config.models import resolve_model

    dtype = faster_dtype("cpu").value
    vocabulary = AutoConfig.from_pretrained(resolve_model(args.model)).vocab_size
    for case in args.cases:
        groups = CASES[case].rollouts(GROUPS, GROUP_SIZE, vocabulary)
        results = measure(args.model, groups, dtype, args.tokens, args.compile)
        head = {"benchmark": "step_profile", "model": args.model, "case": case, "tokens": args.tokens, "dtype": dtype}
        head |= {"compile": args.compile, "cores": len(os.sched_getaffinity(0))}
        print(json.dumps(head | results), flush=True)


if __name__ == "__main__":
    main()
