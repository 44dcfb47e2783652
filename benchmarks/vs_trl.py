"""The training phase (forward, backward, optimizer step) against TRL's GRPOTrainer: same rollouts, same loss.

    python benchmarks/vs_trl.py [--models smollm2 qwen2] [--cases short ragged uniform no_shared_prompt]

Each case is 8 groups of 8 rollouts: random tokens of the lengths in `_rollouts.CASES`, all with an advantage. Ours is
`PolicyModule` under Lightning's Trainer with its defaults. TRL's has no gradient checkpointing and 8 rows a pass; it is
fed with the rollouts, and generates nothing. `qwen2` is a Qwen2 of 4M random parameters, made on the spot. Each side is
a process of its own, and they take turns. Seconds are the median (least, largest) of two rounds, or of as many as fit
into `--seconds`, after a step to warm up. Peak memory is that of the process in these rounds, or of the GPU where there
is one; `ours_same_tokens` is ours with as many tokens a micro-batch as TRL's 8 padded rows have. The dtype `auto` is
the one whose products are faster here; TRL's bf16 is autocast over float32 weights, its default, and its bf16_weights
has no float32 weights at all, so that small updates are lost.

Afterwards both compute a step of the first two groups in float64, and the benchmark fails unless the losses and the
norms of all gradients agree: in float32 gradients of random tokens may be 0.2% off on either side. Prints one JSON line
a case: `ratio` is TRL's time divided by ours, `memory_ratio` is our peak at the same number of tokens divided by TRL's.
`mfu` is the metric `perf/mfu` of our steps, and `ratio_at_peak` what `ratio` would be if ours ran at the speed of the
device's best matrix product throughout: no implementation that computes these tokens gets further on this machine.
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _rollouts import CASES, Rollout
from _turns import EnoughError, Requests, Side, clock, peak_gb, reset_peak, spread, steps_on_request, take_turns

Groups = list[list[Rollout]]

GROUPS, GROUP_SIZE = 8, 8
CHECKED_GROUPS = 2
CHECKED_ROWS_A_PASS = 2  # 8 padded rows of 368 tokens in float64 take TRL more than 15 GB
TOLERANCE = 1e-4  # ours computes softmax and loss in float32
ENVIRONMENT = dict(os.environ)  # before this package sets what libraries read, which is none of TRL's


# -- the processes that train -----------------------------------------------------------------------------------------


def work(spec: dict[str, Any]) -> None:
    """Take a step a request, and report memory and speed at any other; or report one step in float64."""
    requests = Requests()
    warnings.simplefilter("ignore")
    take_steps, check = {"ours": (our_steps, our_check), "trl": (trl_steps, trl_check)}[spec["side"]]
    groups = CASES[spec["case"]].rollouts(spec["groups"], spec["group_size"], spec["vocabulary"])
    if spec["check"]:
        requests.answer(check(spec, groups[:CHECKED_GROUPS]))
    else:
        mfu = take_steps(spec, groups, requests)
        requests.answer({"peak_gb": peak_gb(), "mfu": mfu})


def our_steps(spec: dict[str, Any], groups: Groups, requests: Requests) -> float | None:
    """Take steps as they are asked for; the median of `perf/mfu`, None on a device whose speed is not known."""
    import lightning as L
    from _training import batch_of, fit

    from trinity_lightning.config.algorithm import AlgorithmConfig

    def batches() -> Iterator[Any]:
        yield from steps_on_request(requests, batch_of(groups), lambda: "ready")

    shares: list[float] = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx > 0 and "perf/mfu" in trainer.callback_metrics:
                shares.append(float(trainer.callback_metrics["perf/mfu"]))

    fit(spec["model"], batches(), spec["dtype"], AlgorithmConfig(**spec["algorithm"]), [Look()], accelerator="auto")
    return statistics.median(shares) if shares else None


def our_check(spec: dict[str, Any], groups: Groups) -> dict[str, Any]:
    import lightning as L
    from _training import batch_of, fit

    from trinity_lightning.config.algorithm import AlgorithmConfig

    results: dict[str, Any] = {}

    class Look(L.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.policy.double()

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            results["norms"] = gradient_norms(pl_module.policy)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            results["loss"] = float(outputs["loss"])

    algorithm = AlgorithmConfig(**spec["algorithm"] | {"max_grad_norm": None})
    fit(spec["model"], iter([batch_of(groups)]), "fp32", algorithm, [Look()], accelerator="auto")
    return results


def trl_steps(spec: dict[str, Any], groups: Groups, requests: Requests) -> None:
    from _trl import OnStep, make_trainer, train

    started = 0.0

    def before() -> None:
        nonlocal started
        if trainer.state.global_step == 0:  # the warm-up
            return
        if trainer.state.global_step == 1:
            reset_peak()
            requests.answer("ready")
        if next(iter(requests), "") != "step":
            raise EnoughError
        started = clock()

    def after() -> None:
        if trainer.state.global_step > 1:
            requests.answer(clock() - started)

    rows, callback = spec["groups"] * spec["group_size"], OnStep(before, after=after)
    trainer = make_trainer(spec["model"], spec["dtype"], rows, spec["rows_a_pass"], callback, **spec.get("trl", {}))
    train(trainer, groups)


def trl_check(spec: dict[str, Any], groups: Groups) -> dict[str, Any]:
    from _trl import OnStep, make_trainer, train

    results: dict[str, Any] = {}

    def look() -> None:
        results.update(norms=gradient_norms(trainer.model), loss=trainer.loss)
        raise EnoughError

    rows = sum(map(len, groups))
    callback = OnStep(gradient=look)
    trainer = make_trainer(spec["model"], "fp32", rows, spec["rows_a_pass"], callback, max_grad_norm=0.0)
    trainer.model.double()  # pyright: ignore[reportOptionalMemberAccess]
    train(trainer, groups)
    return results


def gradient_norms(model: Any) -> dict[str, float]:
    return {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None}


# -- the process that measures ----------------------------------------------------------------------------------------


def start(spec: dict[str, Any]) -> Side:
    return Side([__file__, "--work", json.dumps(spec)], ENVIRONMENT)


def compare(spec: dict[str, Any], dtypes: dict[str, str], seconds: float, rounds: int) -> dict[str, Any]:
    """The printed results of a case."""
    sides = {name: start(spec | {"side": name, "dtype": dtype}) for name, dtype in dtypes.items()}
    try:
        for side in sides.values():
            side.answer()
        taken = take_turns(sides, seconds, rounds)
        ends = {name: side.ask("end") for name, side in sides.items()}
    finally:
        for side in sides.values():
            side.close()
    peaks = {name: end["peak_gb"] for name, end in ends.items()}
    differences = compare_steps(*(float64_step(spec | {"side": name}) for name in ("ours", "trl")))
    peaks["ours_same_tokens"] = peak_at_same_tokens(spec | {"side": "ours", "dtype": dtypes["ours"]}, len(taken["trl"]))
    median = {name: statistics.median(values) for name, values in taken.items()}
    ratio, mfu = median["trl"] / median["ours"], ends["ours"]["mfu"]
    return {
        "rounds": len(taken["ours"]),
        "seconds": {name: spread(values) for name, values in taken.items()},
        "ratio": round(ratio, 2),
        "mfu": mfu and round(mfu, 3),
        "ratio_at_peak": mfu and round(ratio / mfu, 2),
        "peak_gb": {name: round(value, 2) for name, value in peaks.items()},
        "memory_ratio": round(peaks["ours_same_tokens"] / peaks["trl"], 2),
        **differences,
    }


def peak_at_same_tokens(spec: dict[str, Any], steps: int) -> float:
    """Peak memory of so many steps of ours with as many tokens a micro-batch as TRL's rows are padded to."""
    tokens = spec["rows_a_pass"] * CASES[spec["case"]].longest
    return alone(spec | {"algorithm": spec["algorithm"] | {"max_tokens_per_micro_batch": tokens}}, steps)["peak_gb"]


def alone(spec: dict[str, Any], steps: int) -> dict[str, Any]:
    """Seconds of so many steps of a side after one to warm up, its peak memory and its `perf/mfu`."""
    side = start(spec)
    try:
        side.answer()
        return {"seconds": [side.ask("step") for _ in range(steps)], **side.ask("end")}
    finally:
        side.close()


def float64_step(spec: dict[str, Any]) -> dict[str, Any]:
    """Loss and norms of gradients, by a process that has nothing else in memory."""
    side = start(spec | {"check": True, "rows_a_pass": CHECKED_ROWS_A_PASS})
    try:
        return side.answer()
    finally:
        side.close()


def compare_steps(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """Relative differences of the loss and of the norms of gradients (the largest); an error where one is too large."""
    if ours["norms"].keys() != theirs["norms"].keys():
        raise RuntimeError(f"other parameters have gradients: {sorted(ours['norms'].keys() ^ theirs['norms'].keys())}")
    of_loss = abs(ours["loss"] - theirs["loss"]) / abs(theirs["loss"])
    of_gradients = {name: abs(ours["norms"][name] - norm) / norm for name, norm in theirs["norms"].items()}
    worst = max(of_gradients, key=lambda name: of_gradients[name])
    if not all(value <= TOLERANCE for value in (of_loss, *of_gradients.values())):  # NaN is not
        raise RuntimeError(
            f"the sides compute something else, beyond rounding ({TOLERANCE}): the losses differ by {of_loss:.1e}, the "
            f"gradients of {worst} by {of_gradients[worst]:.1e}."
        )
    differences = {"loss_difference": of_loss, "gradient_difference": of_gradients[worst]}
    return {name: float(f"{value:.1e}") for name, value in differences.items()}


def dtype_here() -> str:
    from trinity_lightning.common.hardware import faster_dtype

    return faster_dtype().value


def main() -> None:
    args = arguments()
    if args.work:
        work(json.loads(args.work))
        return
    chosen = {"ours": args.dtype, "trl": args.trl_dtype}
    dtypes = {side: dtype_here() if dtype == "auto" else dtype for side, dtype in chosen.items()}
    from _models import folder_of

    groups, group_size = (2, 4) if args.quick else (GROUPS, GROUP_SIZE)
    seconds, rounds = (0.0, 1) if args.quick else (args.seconds, 2)
    with tempfile.TemporaryDirectory() as scratch:
        for model in args.models:
            folder, vocabulary = folder_of(model, Path(scratch))
            for case in args.cases:
                spec = {"model": folder, "vocabulary": vocabulary, "case": case, "algorithm": args.algorithm}
                spec |= {"groups": groups, "group_size": group_size, "rows_a_pass": group_size, "check": False}
                result = {
                    "benchmark": "vs_trl",
                    "trl": importlib.metadata.version("trl"),
                    "model": model,
                    "case": case,
                    "rows": groups * group_size,
                    "dtypes": dtypes,
                    "algorithm": args.algorithm,
                    "cores": len(os.sched_getaffinity(0)),
                }
                print(json.dumps(result | compare(spec, dtypes, seconds, rounds)), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2", "qwen2"], help="qwen2, or any of this package's")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seconds", type=float, default=60.0, help="of a case's rounds")
    parser.add_argument("--dtype", choices=("auto", "bf16", "fp32"), default="auto")
    parser.add_argument("--trl-dtype", choices=("auto", "bf16", "fp32", "bf16_weights"), default="auto")
    parser.add_argument("--algorithm", type=json.loads, default={}, help="settings of ours, as JSON")
    parser.add_argument("--quick", action="store_true", help="two groups of four, one round: whether it works")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
