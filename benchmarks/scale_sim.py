"""Rollouts that do not wait, on 8 to 4,096 GPUs: the real controller and scheduler with modelled engines and trainers.

    python benchmarks/scale_sim.py modes [--gpus 8]        # synchronous, continue, wait, servers; k and d; lengths
    python benchmarks/scale_sim.py shares [--gpus 16]      # how many of the GPUs roll out
    python benchmarks/scale_sim.py scale                   # 8 to 4,096 GPUs; CPU time of controller and scheduler
    python benchmarks/scale_sim.py calibrate RUN [RUN...]  # against runs of this machine

Time is virtual: nothing sleeps. `GroupRollouts`, `StalenessController` and `Scheduler` are those of a run, and so is
the event loop but for its clock. An engine's forward pass takes longer with more requests, and a training step with
more tokens. Engines and trainer share all GPUs (`in turns`: rollouts are suspended while the trainer trains), or have
their own (`servers`). The speeds are those of a model of 8 billion parameters on H200s, estimated from data sheets (see
`Speed` and `Machine`); by default one response in 740 has 20 times the median length. Each GPU adds 8 groups of 8
rollouts to a step, up to 4,096 groups.

`calibrate` takes run folders of one engine in one process, trained with `buffer.keep=true` and without filters and
evaluations, the first with max_staleness=0. It fits the speeds to every other step of the first run, predicts its other
steps and those of the other runs from the lengths of their responses, and exits with 1 if a mean differs by more than
15%. Prints a table and one JSON line; `--plot FILE` draws a picture.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from _calibration import TOLERANCE, calibrated
from _modelled import Lengths
from _simulated import Machine, Outcome, Setting, simulate

MOST_GROUPS = 4096
GPUS = (8, 64, 512, 4096)
KINDS = ("lognormal", "uniform", "fixed")
COLUMNS = ("seconds/step", "tokens/s", "gain", "generating", "training", "staleness", "again", "CPU us/rollout", "load")


def setting_of(args: argparse.Namespace, gpus: int, **changes: Any) -> Setting:
    """A setting of so many GPUs, with as many groups as these deserve."""
    groups = min(gpus * args.groups, MOST_GROUPS)
    return replace(Setting(gpus=gpus, batch_size=groups, steps=args.steps, machine=Machine(sync=args.sync)), **changes)


# -- what is compared --------------------------------------------------------------------------------------------------


def modes(args: argparse.Namespace) -> dict[str, list[Setting]]:
    """Ways to roll out and to train, with each distribution of lengths."""
    half = args.gpus // 2
    ways: list[dict[str, Any]] = [
        {},
        {"max_staleness": 1, "in_flight": "wait"},
        *({"max_staleness": k, "run_ahead": d} for k, d in ((1, 1), (2, 1), (4, 1), (2, 2), (4, 4))),
        {"servers": half},
        {"servers": half, "max_staleness": 2, "run_ahead": 2, "in_flight": "wait"},
        *({"servers": half, "max_staleness": k, "run_ahead": d} for k, d in ((1, 1), (2, 1), (4, 1), (2, 2), (4, 4))),
    ]
    return {
        f"{kind} lengths": [setting_of(args, args.gpus, lengths=Lengths(kind), **way) for way in ways]
        for kind in args.lengths
    }


def shares(args: argparse.Namespace) -> dict[str, list[Setting]]:
    """Shares of the GPUs that roll out, beside all GPUs in turns."""
    tables = {}
    for k, d in ((1, 1), (4, 1)):
        settings = [setting_of(args, args.gpus, max_staleness=k, run_ahead=d)]
        settings += [replace(settings[0], servers=args.gpus * eighths // 8) for eighths in range(2, 8)]
        tables[f"k={k}, d={d}"] = settings
    return tables


def scale(args: argparse.Namespace) -> dict[str, list[Setting]]:
    """Synchronous runs and others on more and more GPUs."""
    tables = {}
    for gpus in args.scale:
        base = setting_of(args, gpus)
        base = replace(base, steps=max(args.rollouts // (base.batch_size * base.repeat_times), 4))
        ahead = replace(base, max_staleness=4, run_ahead=1)
        tables[f"{gpus:,} GPUs"] = [base, ahead, replace(ahead, servers=gpus // 2)]
    return tables


# -- tables, pictures, lines -------------------------------------------------------------------------------------------


def row_of(outcome: Outcome, first: Outcome) -> list[str]:
    """The cells of a row; the gain is in tokens a second, against the first row of the table."""
    return [
        f"{outcome.step:.1f}",
        f"{outcome.tokens_per_second:,.0f}",
        f"{outcome.tokens_per_second / first.tokens_per_second:.2f}x",
        f"{outcome.generating:.2f}",
        f"{outcome.training:.2f}",
        f"{outcome.staleness[0]:.1f} ({outcome.staleness[1]:.0f})",
        f"{outcome.computed_again:.2f} ({outcome.again_seconds:.1f} s)",
        f"{outcome.own_microseconds:.0f}",
        f"{outcome.load:.3f}",
    ]


def compare(tables: dict[str, list[Setting]]) -> dict[str, dict[str, Outcome]]:
    """Simulate all settings, and print a table of each part as it comes."""
    outcomes: dict[str, dict[str, Outcome]] = {}
    for title, settings in tables.items():
        print(f"\n| {title} | {' | '.join(COLUMNS)} |\n|{' --- |' * (len(COLUMNS) + 1)}")
        part = outcomes[title] = {}
        for setting in settings:
            part[setting.name] = outcome = simulate(setting)
            print(f"| {' | '.join([setting.name, *row_of(outcome, next(iter(part.values())))])} |", flush=True)
    return outcomes


def draw(outcomes: dict[str, dict[str, Outcome]], file: Path) -> None:
    """Draw seconds a step: a panel for each table, a bar for each setting."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(outcomes), figsize=(4.6 * len(outcomes), 3.8), layout="constrained", squeeze=False
    )
    for axis, (title, part) in zip(axes[0], outcomes.items(), strict=True):
        best = min(outcome.step for outcome in part.values())
        colours = ["#2a78d6" if outcome.step == best else "#9db8d9" for outcome in part.values()]
        bars = axis.barh(list(part), [outcome.step for outcome in part.values()], color=colours)
        axis.bar_label(bars, fmt="%.0f", padding=3, fontsize=8)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("seconds a step", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.12)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def rounded(outcome: Outcome) -> dict[str, Any]:
    """An outcome's numbers for the JSON line: means instead of all steps."""
    numbers = asdict(outcome) | {"seconds": outcome.step}
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in numbers.items()}


# -- the command -------------------------------------------------------------------------------------------------------


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, gpus in (("modes", 8), ("shares", 16), ("scale", None)):
        command = commands.add_parser(name)
        command.add_argument("--steps", type=int, default=24, help="steps of each run (24)")
        command.add_argument("--groups", type=int, default=8, help="groups of a step for each GPU (8)")
        command.add_argument("--sync", type=float, default=2.0, help="seconds of a weight sync (2)")
        command.add_argument("--plot", type=Path, help="a PNG file to draw")
        if gpus is not None:
            command.add_argument("--gpus", type=int, default=gpus, help=f"number of GPUs ({gpus})")
    commands.choices["modes"].add_argument("--lengths", nargs="+", choices=KINDS, default=KINDS)
    commands.choices["scale"].add_argument("--scale", nargs="+", type=int, default=GPUS, help="numbers of GPUs")
    commands.choices["scale"].add_argument(
        "--rollouts", type=int, default=100_000, help="rollouts of each run (100000)"
    )
    command = commands.add_parser("calibrate")
    command.add_argument("runs", nargs="+", type=Path, help="folders of runs, the first with max_staleness=0")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parsed(arguments)
    if args.command == "calibrate":
        machine, predictions = calibrated(args.runs)
        for run, (measured, predicted) in predictions.items():
            error = f"{predicted / measured - 1:+.0%}"
            print(f"{run}: {measured:.3f} s a step measured, {predicted:.3f} s predicted ({error})")
        results: dict[str, Any] = {"machine": asdict(machine), "steps": predictions}
        close = all(abs(predicted / measured - 1) <= TOLERANCE for measured, predicted in predictions.values())
    else:
        outcomes = compare({"modes": modes, "shares": shares, "scale": scale}[args.command](args))
        if args.plot is not None:
            draw(outcomes, args.plot)
        results = {title: {name: rounded(one) for name, one in part.items()} for title, part in outcomes.items()}
        close = True
    print(json.dumps({"benchmark": "scale_sim", "command": args.command, "results": results}))
    return 0 if close else 1


if __name__ == "__main__":
    sys.exit(main())
