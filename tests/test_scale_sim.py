"""The simulator's engine is exact, its clock jumps, and it finds the speeds of runs again."""

import asyncio
import importlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.runs import ROOT

from trinity_lightning.buffer.step_files import keep_step
from trinity_lightning.common.experience import EID, Experience

SPEED = {"step": 0.5, "request": 0.25, "prompt_token": 0.125}


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


@pytest.fixture
def modelled() -> Any:
    return importlib.import_module("_modelled")


@pytest.fixture
def simulated() -> Any:
    return importlib.import_module("_simulated")


@pytest.fixture
def scale_sim() -> Any:
    return importlib.import_module("scale_sim")


# -- the engine --------------------------------------------------------------------------------------------------------


def ends_by_token(calls: Sequence[tuple[int, Sequence[int]]], prompt: int, most: int) -> list[float]:
    """Times at which calls (passes before their arrival, lengths) end, computed one forward pass after the other."""
    waiting, running, ends, now, passes = list(enumerate(calls)), list[list[int]](), [0.0] * len(calls), 0.0, 0
    left = [len(lengths) for _, lengths in calls]
    queue: list[list[int]] = []
    while waiting or queue or running:
        while waiting and waiting[0][1][0] <= passes:
            call, (_, lengths) = waiting.pop(0)
            queue += [[call, length, length] for length in lengths]
        begun = {call for call, length, to_go in running}
        while queue and len(running) < most:
            call, length, to_go = queue.pop(0)
            if call not in begun and left[call] == len(calls[call][1]):
                now += prompt * SPEED["prompt_token"]
            begun.add(call)
            running.append([call, length, to_go])
        now += SPEED["step"] + SPEED["request"] * len(running)
        passes += 1
        for request in running:
            request[2] -= 1
            if not request[2]:
                left[request[0]] -= 1
                ends[request[0]] = now
        running = [request for request in running if request[2]]
    return ends


@pytest.mark.parametrize("most", [2, 5, 100])
def test_an_engine_takes_as_long_as_its_forward_passes(most: int, modelled: Any) -> None:
    calls = [(0, (7, 3, 12)), (0, (1, 1)), (0, (40, 5, 5, 6)), (0, (9,))]

    async def run() -> list[float]:
        engine = modelled.ModelledEngine(modelled.Speed(**SPEED, most_requests=most), [c for _, c in calls], 4)

        async def ask(number: int) -> float:
            await engine.generate([number], n=9)
            return asyncio.get_running_loop().time()

        return await asyncio.gather(*map(ask, range(len(calls))))

    assert modelled.run_virtually(run()) == pytest.approx(ends_by_token(calls, 4, most), abs=1e-4)


def test_requests_that_come_later_slow_the_others_down(modelled: Any) -> None:
    async def run() -> tuple[tuple[float, float], float]:
        loop = asyncio.get_running_loop()
        engine = modelled.ModelledEngine(modelled.Speed(1, 1, 0.5), [[10], [2]], 2)

        async def ask(number: int, after: float) -> float:
            await asyncio.sleep(after)
            await engine.generate([number])
            return loop.time()

        first, second = await asyncio.gather(ask(0, 0), ask(1, 9))
        return (first, second), engine.generating

    # The prompt takes 1 s, 4 tokens take 8 s; then the other's prompt 1 s, 2 tokens of both 6 s, and the last 4 8 s.
    assert modelled.run_virtually(run()) == ((24.0, 16.0), 24.0)


def test_an_engine_that_rests_goes_on_where_it_was_and_computes_all_again_after_a_sync(modelled: Any) -> None:
    async def run() -> tuple[float, float, float]:
        loop = asyncio.get_running_loop()
        engine = modelled.ModelledEngine(modelled.Speed(1, 1, 0.5), [[10, 3]], 2)
        asked = asyncio.create_task(engine.generate([0], n=2))
        await asyncio.sleep(1 + 2 * 3)  # the prompt, and two tokens of both
        engine.rest()
        await asyncio.sleep(100)
        engine.sync(1)
        engine.go_on()
        await asked
        return loop.time(), engine.computed_again, engine.generating

    again = 2 * (2 + 2)
    ends = 7 + 100 + again * 0.5 + 3 + 7 * 2
    assert modelled.run_virtually(run()) == (ends, again, ends - 100)


def test_a_deadlock_is_an_error(modelled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelled, "DEADLOCK_SECONDS", 0.01)

    async def wait() -> None:
        await asyncio.sleep(1e6)
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="deadlock"):
        modelled.run_virtually(wait())


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_synchronous_run_takes_the_time_of_its_longest_rollouts(modelled: Any, simulated: Any) -> None:
    lengths = modelled.Lengths("seen", seen=[[3, 5], [20, 1], [4, 4], [6, 2]])
    machine = simulated.Machine(modelled.Speed(1, 0, 0), train_token=0.5, train_step=2, sync=3)
    setting = simulated.Setting(
        gpus=1, batch_size=2, repeat_times=2, lengths=lengths, prompt_tokens=1, steps=2, warm_up=0, machine=machine
    )
    outcome = simulated.simulate(setting)
    assert list(outcome.seconds) == [20 + 2 + (29 + 4) / 2, 3 + 6 + 2 + (16 + 4) / 2]
    assert outcome.staleness == (0, 0)


def test_a_long_rollout_goes_on_while_steps_are_trained(modelled: Any, simulated: Any) -> None:
    lengths = modelled.Lengths("seen", seen=[[50], *([10] for _ in range(30))])
    machine = simulated.Machine(modelled.Speed(1, 0, 0), train_token=0, train_step=5, sync=0)
    setting = simulated.Setting(
        gpus=1, batch_size=2, repeat_times=1, lengths=lengths, prompt_tokens=1, steps=6, warm_up=0, machine=machine
    )
    outcomes = {
        in_flight: simulated.simulate(replace(setting, max_staleness=2, in_flight=in_flight))
        for in_flight in ("continue", "wait")
    }
    assert sum(outcomes["wait"].seconds) > sum(outcomes["continue"].seconds)
    assert outcomes["continue"].staleness[1] == 2
    assert outcomes["wait"].computed_again == 0 < outcomes["continue"].computed_again


def test_every_comparison_prints_a_table_and_a_line(
    scale_sim: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "modes.png"
    small = ("--steps", "3", "--groups", "1")
    assert scale_sim.main(["modes", *small, "--gpus", "4", "--lengths", "uniform", "--plot", str(picture)]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert scale_sim.main(["shares", *small, "--gpus", "8"]) == 0
    assert scale_sim.main(["scale", *small, "--scale", "4", "8", "--rollouts", "64"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["command"] for line in lines] == ["modes", "shares", "scale"]
    [ways] = lines[0]["results"].values()
    assert ways["in turns, continue, k=4, d=1"]["staleness"][1] <= 4
    assert all(way["own_microseconds"] > 0 for way in ways.values())


# -- calibration -------------------------------------------------------------------------------------------------------


def write_run(folder: Path, simulated: Any, setting: Any) -> Path:
    """A run's folder as a run of this setting would have left it."""
    outcome = simulated.simulate(setting)
    folder.mkdir()
    settings = {
        "explorer": {name: getattr(setting, name) for name in ("batch_size", "repeat_times", "max_staleness")},
        "engine": {"max_num_seqs": setting.machine.speed.most_requests},
    }
    (folder / "config.yaml").write_text(json.dumps(settings))
    rows = ["time/step,time/rollout,time/sync_weight"]
    for step, seconds in enumerate(outcome.seconds):
        groups = setting.lengths.seen[step * setting.batch_size : (step + 1) * setting.batch_size]
        trained = setting.train_seconds(sum(map(sum, groups)) + setting.prompt_tokens * sum(map(len, groups)))
        sync = setting.machine.sync if step else 0
        rows.append(f"{seconds},{seconds - trained - sync},{sync}")
        keep_step(folder / "experiences", step + 1, experiences_of(step, groups, setting.prompt_tokens))
    (folder / "metrics.csv").write_text("\n".join([*rows, ""]))
    return folder


def experiences_of(step: int, groups: Sequence[Sequence[int]], prompt: int) -> list[Experience]:
    return [
        Experience(eid=EID(batch=step + 1, task=task, run=run), tokens=[1] * (prompt + length), prompt_length=prompt)
        for task, group in enumerate(groups)
        for run, length in enumerate(group)
    ]


def test_calibration_finds_the_speeds_of_a_run_and_predicts_others(
    scale_sim: Any, modelled: Any, simulated: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = modelled.Lengths(median=20, most=200).table(96, 4)
    speed = modelled.Speed(0.5, 0.125, 0.25, most_requests=12)
    base = simulated.Setting(
        gpus=1,
        batch_size=8,
        repeat_times=4,
        lengths=modelled.Lengths("seen", seen=table),
        prompt_tokens=30,
        steps=12,
        warm_up=0,
        machine=simulated.Machine(speed, train_token=0.0625, train_step=7, sync=3),
    )
    runs = [write_run(tmp_path / "sync", simulated, base)]
    runs.append(write_run(tmp_path / "async", simulated, replace(base, max_staleness=2)))
    assert scale_sim.main(["calibrate", *map(str, runs)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert result["machine"]["speed"]["step"] == pytest.approx(0.5, rel=0.1)
    assert result["machine"]["speed"]["request"] == pytest.approx(0.125, rel=0.1)
    assert result["machine"]["train_token"] == pytest.approx(0.0625, rel=0.1)
    for measured, predicted in result["steps"].values():
        assert predicted == pytest.approx(measured, rel=0.05)


def test_calibration_says_what_a_run_lacks(scale_sim: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"buffer\.keep=true"):
        scale_sim.main(["calibrate", str(tmp_path)])
