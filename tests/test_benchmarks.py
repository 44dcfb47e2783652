"""Benchmarks run; what they measure is judged by people, what they check is checked here too."""

import asyncio
import importlib
import importlib.metadata
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.compose import composed
from support.runs import ROOT, RunTrain

from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.config.algorithm import Layout
from trinity_lightning.config.models import load_tokenizer, resolve_model
from trinity_lightning.config.registry import options
from trinity_lightning.config.run import typed_config, validate
from trinity_lightning.trainer.layout import collate, cut
from trinity_lightning.trainer.policy import PolicyModule

GPU = str(ROOT / "benchmarks" / "gpu.py")
RunBenchmark = Callable[..., dict[str, Any]]


@pytest.fixture
def run_benchmark(run_train: RunTrain, tmp_path: Path) -> RunBenchmark:
    """The last JSON line that a benchmark prints."""

    def run(name: str, *arguments: str) -> dict[str, Any]:
        done = run_train(tmp_path, *arguments, program=str(ROOT / "benchmarks" / name), timeout=300)
        assert done.returncode == 0, done.stdout[-4000:]
        return json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])

    return run


def test_faults_lose_nothing(run_benchmark: RunBenchmark) -> None:
    results = run_benchmark("faults.py", "100")
    assert results["failed"] == {"raise": 10, "hang": 5, "cancel": 2}
    assert (results["succeeded"], results["lost"]) == (83, 0)


def test_killed_ray_workers_lose_nothing(run_benchmark: RunBenchmark) -> None:
    results = run_benchmark("ray_faults.py", "80")
    assert (results["killed_once"], results["killed_always"]) == (3, 1)
    assert (results["failed"], results["succeeded"], results["lost"]) == (1, 79, 0)


def test_experience_measures_every_size(run_benchmark: RunBenchmark) -> None:
    sizes = ("--sizes", "4x64", "2x128", "--pictures", "8x1x96")
    results = run_benchmark("experience.py", *sizes, "--seconds", "0")
    for size in ("4x64", "2x128"):
        measured = results[size]
        assert all(measured[name]["ratio"] > 0 for name in ("serialize", "deserialize", "gather"))
    pictures = results["pictures 8x1x96"]
    assert all(pictures[name]["ratio"] > 0 for name in ("serialize", "deserialize"))
    assert pictures["payload_mb"] < pictures["version_2_mb"] / 3


def test_contended_training_measures_every_setting(run_benchmark: RunBenchmark) -> None:
    arguments = ("--model", "tiny", "--rounds", "1", "--busy", "0", "1", "--turns", "7")
    results = run_benchmark("contended_training.py", *arguments)
    measured = {"seconds", "quiet_cost", "gain", "fewer_threads_gain"}
    assert set(results) == {"benchmark", "model", "rows", "cores"} | measured
    assert {count: set(by_setting) for count, by_setting in results["seconds"].items()} == {
        "0": {"package", "libgomp", "one_thread", "7"},
        "1": {"package", "libgomp", "one_thread", "7"},
    }
    assert (set(results["quiet_cost"]), set(results["gain"])) == ({"0"}, {"1"})
    (cost,), (gain,) = results["quiet_cost"].values(), results["gain"].values()
    assert cost > 0
    assert gain > 0


def test_reward_workers_measures_training_beside_a_reward_in_each_place(run_benchmark: RunBenchmark) -> None:
    results = run_benchmark("reward_workers.py", "--model", "tiny", "--rounds", "1")
    gains = {"gain", "gain_of_interval"}
    assert set(results) == {"benchmark", "model", "rows", "rounds", "cores", "seconds", "rewards_per_second", *gains}
    assert set(results["seconds"]) == {"none", "thread_5ms", "thread", "process"}
    assert set(results["rewards_per_second"]) == {"thread_5ms", "thread", "process"}
    assert all(results[gain] > 0 for gain in gains)


def test_memory_names_every_part_of_the_peak(run_benchmark: RunBenchmark) -> None:
    results = run_benchmark("memory.py", "--model", "tiny", "--tokens", "256", "--steps", "2")
    parts = {"libraries", "vLLM", "weights", "masters", "moments", "gradients", "activations", "rest"}
    assert set(results["gb"]) == parts
    assert sum(results["gb"].values()) == pytest.approx(results["peak_gb"], abs=0.01)
    assert results["gb"]["moments"] == pytest.approx(2 * results["gb"]["masters"], abs=0.002)
    assert len(results["step_peaks_gb"]) == 2


def test_vs_trl_computes_the_same_on_both_sides(run_benchmark: RunBenchmark) -> None:
    results = run_benchmark("vs_trl.py", "--quick", "--models", "tiny", "--cases", "ragged", "--dtype", "fp32")
    assert (results["case"], results["rows"], results["rounds"]) == ("ragged", 8, 1)
    assert set(results["seconds"]) == {"ours", "trl"}
    assert set(results["peak_gb"]) == {"ours", "trl", "ours_same_tokens"}
    assert all(gb > 0.1 for gb in results["peak_gb"].values())
    assert results["ratio_at_peak"] > results["ratio"]
    assert results["gradient_difference"] < 1e-5


# -- gpu.py ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module benchmarks/gpu.py."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("gpu")


def test_gpu_ends_with_a_sentence_where_there_is_none(run_train: RunTrain, tmp_path: Path) -> None:
    done = run_train(tmp_path, "--stages", "c", program=GPU)
    if torch.cuda.is_available():
        pytest.skip("there is one")
    [line] = done.stdout.splitlines()
    assert done.returncode == 1
    assert line.startswith("gpu.py: this machine has no NVIDIA GPU")
    assert run_train(tmp_path, "--stages", "c,x", program=GPU).stdout.startswith("gpu.py: there is no stage 'x'")


def test_gpu_measures_training_on_a_cpu_too(run_train: RunTrain, tmp_path: Path) -> None:
    """The other stages take minutes: they start engines, servers, and TRL."""
    small = ("--device", "cpu", "--model", "qwen2", "--logs", str(tmp_path / "logs"))
    done = run_train(tmp_path, "--stages", "a,c,g", *small, program=GPU, timeout=500)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stdout
    [tests] = [result for result in results if result["what"] == "tests"]
    assert 0 < tests["tests"] == tests["skipped"]
    trained = [result for result in results if result["what"].startswith("train")]
    assert {(result["rows"], result["tokens"]) for result in trained} >= {(8, 128), (8, 32), (16, 128), (16, 32)}
    assert {result["stage"] for result in trained} == {"c", "g"}
    for result in trained:
        assert result["seconds"]["median"] > 0
        assert 0 < result["peak_over_plan"] < 2
    plain = [result for result in trained if "compiled" not in result["what"]]
    assert {(sum(result["compiled_in_steps"]), result["recompilations"]) for result in plain} == {(0, 0)}
    [profile] = [result for result in results if result["what"] == "profile"]
    assert sum(profile["share"].values()) == pytest.approx(1, abs=0.02)
    stages = [result for result in results if result["what"] == "stage"]
    assert [stage["stage"] for stage in stages] == ["a", "c", "g"]
    assert all("failed" not in stage and Path(stage["log"]).exists() for stage in stages)


STAND_IN = """
import time

def works(job):
    print("a library's words")
    job.report("measured", seconds=1.5)

def stops(job):
    job.report("measured", seconds=2.5)
    with job.part("tried") as values:
        values["seconds"] = 3.5
        raise RuntimeError("out of memory")

def breaks(job):
    raise RuntimeError("nothing works here")

def hangs(job):
    job.report("measured", seconds=4.5)
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_stage_of_gpu_that_fails_or_hangs_does_not_end_the_others(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The stages are stand-ins, in processes of their own; one has 15 seconds, and for the last no time is left."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    stages = {name: gpu.Stage(f"stand_in.{name}", 15 if name == "hangs" else 60, 1) for name in ("works", "stops")}
    stages |= {name: gpu.Stage(f"stand_in.{name}", 15, 1) for name in ("breaks", "hangs")}
    stages["late"] = gpu.Stage("stand_in.works", 60, 1e6)
    driver = tmp_path / "driver.py"  # `gpu.py --work` with these stages
    driver.write_text(f"import sys, gpu\nfrom gpu import Stage\ngpu.STAGES = {stages!r}\ngpu.main()\n")
    monkeypatch.setattr(gpu, "STAGES", stages)
    monkeypatch.setattr(gpu, "__file__", str(driver))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'benchmarks'}:{tmp_path}")
    monkeypatch.setattr("sys.argv", ["gpu.py", "--device", "cpu", "--logs", str(tmp_path / "logs"), "--minutes", "5"])
    assert gpu.take_all(list(stages), gpu.arguments()) == 3
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    seconds = {line["stage"]: line["seconds"] for line in lines if line["what"] == "measured"}
    assert seconds == {"works": 1.5, "stops": 2.5, "hangs": 4.5}
    assert [line["failed"] for line in lines if line["what"] == "tried"] == ["RuntimeError: out of memory"]
    ends = {line["stage"]: line for line in lines if line["what"] == "stage"}
    assert list(ends) == list(stages)
    assert "failed" not in ends["works"]
    assert ends["stops"]["failed_parts"] == 1
    assert "nothing works here" in ends["breaks"]["failed"]
    assert "took longer" in ends["hangs"]["failed"]
    assert "left_out" in ends["late"]
    assert "a library's words" in (tmp_path / "logs" / "works.log").read_text()


def test_the_table_of_gpu_is_written_between_its_marks(gpu: Any) -> None:
    table = importlib.import_module("_gpu_table")
    page = table.PAGE.read_text()
    head = {"benchmark": "gpu", "on": "NVIDIA H100", "torch": "2.13.0", "vllm": None, "model": "0.5B"}
    lines = [
        head | {"stage": "c", "what": "train", "rows": 128, "seconds": {"median": 1.5, "min": 1.25, "max": 2}},
        head | {"stage": "c", "what": "profile", "rows": 128, "share": {"products": 0.5, "head": 0.0}},
        head | {"stage": "b", "what": "start", "failed": "no | vLLM"},
        {"benchmark": "gpu", "stage": "e", "what": "stage", "left_out": "3 s are left of --minutes"},
        {"benchmark": "gpu", "stage": "c", "what": "stage", "seconds": 9.5, "log": "c.log"},
    ]
    written = table.with_measured(page, lines)
    part = written.partition(table.BEGIN)[2].partition(table.END)[0]
    assert "### NVIDIA H100, torch 2.13.0, no vLLM\n" in part
    assert "| model | rows | seconds |\n| --- | --- | --- |\n| 0.5B | 128 | 1.5 (1.25..2) |" in part
    assert "| products | 0.5 |" in part
    assert "no / vLLM" in part
    assert "- e: 3 s are left of --minutes" in part
    assert part.index("stage b") < part.index("stage c")
    assert table.with_measured(written, []) == table.with_measured(page, [])
    assert table.NOTHING in table.with_measured(page, [])


def test_a_file_without_results_leaves_the_page_of_the_gpu_as_it_is(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = importlib.import_module("_gpu_table")
    page, results = tmp_path / "gpu.md", tmp_path / "results.jsonl"
    page.write_text(f"{table.BEGIN}{table.NOTHING}{table.END}")
    monkeypatch.setattr(table, "PAGE", page)
    results.write_text('{"benchmark": "another", "on": "H100"}\nwords\n{"cut off\n')
    for wrong in (results, tmp_path, tmp_path / "missing.jsonl"):
        with pytest.raises(SystemExit, match=wrong.name):
            table.write(wrong)
    assert table.NOTHING in page.read_text()
    head = {"benchmark": "gpu", "stage": "c", "what": "train", "on": "H100", "torch": "2.13.0", "vllm": None}
    results.write_text(json.dumps(head | {"rows": 128}) + '\n{"benchmark": "gpu", "stage": "c", "wh')
    table.write(results)
    assert "### H100" in page.read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # TRL's, of another vLLM
def test_trl_can_be_given_any_settings_and_its_side_says_what_it_runs_with(gpu: Any) -> None:
    pytest.importorskip("trl")
    trl, stage = importlib.import_module("_trl"), importlib.import_module("_gpu_trl")
    for settings in ({}, {"gradient_checkpointing": True}, {"model_init_kwargs": {"attn_implementation": "eager"}}):
        trainer = trl.make_trainer(str(resolve_model("tiny")), "bf16_weights", 8, 4, trl.OnStep(), **settings)
        assert trainer.args.gradient_checkpointing is settings.get("gradient_checkpointing", False)
        assert trainer.args.model_init_kwargs["dtype"] == "bfloat16"
    assert stage.installed()["trl"] == importlib.metadata.version("trl")


def test_scripts_may_ask_an_engine_for_other_rollouts(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = importlib.import_module("rollout")
    engine = SimpleNamespace(tokenizer=load_tokenizer("tiny"))
    monkeypatch.setattr(rollout, "REQUESTS", 3)
    assert [len(rollout.prompts(engine, count)) for count in (None, 2)] == [3, 2]
    asked: list[int] = []

    async def generate(prompt: list[int], max_tokens: int) -> list[Any]:
        asked.append(max_tokens)
        return [SimpleNamespace(token_ids=[0] * max_tokens)]

    engine.generate, driver = generate, SimpleNamespace(run=asyncio.run)
    monkeypatch.setattr(rollout, "sampling", lambda i: {"max_tokens": 10 + i})
    assert rollout.run_async(engine, driver, [[1], [2]]) == 21
    assert rollout.run_async(engine, driver, [[1], [2]], lambda i: {"max_tokens": 5}) == 10
    assert asked == [10, 11, 5, 5]


@pytest.mark.slow
def test_compilations_and_recompilations_are_counted(gpu: Any) -> None:
    training = importlib.import_module("_gpu_training")

    @torch.compile(backend="eager", dynamic=False)
    def double(tensor: torch.Tensor) -> torch.Tensor:
        return 2 * tensor

    before = training.counters["stats"]["unique_graphs"]
    with training.recompilations() as reasons:
        for rows in (3, 4, 4):
            double(torch.ones(rows))
    assert training.counters["stats"]["unique_graphs"] - before == 2
    assert len(reasons) == 1


@pytest.fixture
def learning(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module benchmarks/learning.py."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("learning")


def test_every_recipe_learns_in_the_benchmark_or_has_a_reason_not_to(learning: Any) -> None:
    assert sorted([*learning.RECIPES, *learning.NOT_HERE]) == sorted(options("recipe"))


@pytest.mark.parametrize("recipe", ["lora", "sft", "streams"])
def test_learning_gives_a_recipe_what_it_needs(recipe: str, learning: Any, tmp_path: Path) -> None:
    needs = learning.Needs(tmp_path)
    needs.update(dict.fromkeys(learning.MODELS, tmp_path))
    arguments = [argument.format_map(needs) for argument in learning.RECIPES[recipe].arguments]
    typed_config(composed(f"+recipe={recipe}", *learning.TINY, *arguments))


def test_learning_makes_what_recipes_need_once(learning: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs: list[tuple[str, ...]] = []

    def train(folder: Path, recipe: str, *arguments: str) -> None:
        runs.append((recipe, *arguments))
        folder.mkdir(exist_ok=True)
        steps = [f"{step / 10},{1 / (1 + step)}\n" for step in range(10)]
        (folder / "metrics.csv").write_text("".join(["reward/mean,actor/pg_loss\n", *steps]))

    monkeypatch.setattr(learning, "train", train)
    needs = learning.Needs(tmp_path)
    results = [learning.learned("on_policy_distill_top_k", seed, needs) for seed in (1, 2)]
    assert [name for name, *_ in runs] == ["grpo", "on_policy_distill_top_k", "on_policy_distill_top_k"]
    assert f"auxiliary_models.teacher.model={tmp_path}/teacher/model" in runs[1]
    assert [curves["reward/mean"] for curves in results] == [[0.05, 0.85]] * 2
    assert results[0]["actor/pg_loss"] == [0.75, 0.106]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*")  # Lightning's own
def test_a_batch_is_asked_for_when_the_one_before_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    training = importlib.import_module("_training")
    seen: list[str] = []

    def batches() -> Iterator[OptimizerBatch]:
        for rows in (2, 4, 8):
            seen.append(f"ask {rows}")
            yield training.make_batch(rows)
            seen.append(f"done {rows}")

    def train(self: PolicyModule, batch: OptimizerBatch, batch_idx: int) -> None:
        seen.append(f"train {len(batch.experiences)}")

    monkeypatch.setattr(PolicyModule, "training_step", train)
    training.fit("tiny", batches(), "fp32")
    assert seen == [f"{word} {rows}" for rows in (2, 4, 8) for word in ("ask", "train", "done")]


def test_pictures_of_a_group_are_one_or_one_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = importlib.import_module("pictures")
    for alike, different in ((True, 2), (False, 6)):
        batch = benchmark.make_batch(groups=2, rows=3, alike=alike)
        (part,) = cut(batch, range(6), 10_000, Layout.padded)
        pictures = collate(batch, part, torch.device("cpu")).inputs["pictures"]
        assert pictures.arguments["pixel_values"].shape[:2] == (1, different)
        assert len(pictures.places) == 6 * benchmark.PICTURE_TOKENS


def test_growth_measures_every_size(run_benchmark: RunBenchmark) -> None:
    results = run_benchmark("growth.py", "--model", "tiny", "--rounds", "1")
    assert results["response_tokens"]["rollouts x8"] > 7 * results["response_tokens"]["1"]
    assert results["seconds"].keys() == results["growth"].keys() == results["response_tokens"].keys()
    assert results["growth"]["1"] == 1


def test_utilization_is_that_of_the_metric(run_benchmark: RunBenchmark) -> None:
    results = run_benchmark("utilization.py", "--model", "tiny", "--cases", "ragged", "--rounds", "1")
    assert results["dtype"] in ("bf16", "fp32")
    case = results["cases"]["ragged"]
    assert 0 < case["mfu"] < 1
    assert case["tokens_6n"] > 0
    assert case["peak_tflops"] > 0


def test_step_profile_accounts_for_the_whole_step(run_benchmark: RunBenchmark) -> None:
    results = run_benchmark("step_profile.py", "--model", "tiny")
    assert sum(results["share"].values()) == pytest.approx(1, abs=0.01)
    assert all(share >= 0 for share in results["share"].values())
    assert {"products", "attention", "head", "optimizer", "gradients into float32"} <= set(results["share"])
    of_shapes = sum(product["share"] for product in results["products"].values())
    assert 0 < of_shapes <= results["share"]["products"] + 0.01
    assert results["mfu"] < results["ceiling"]


@pytest.mark.parametrize("norms", [{"a": 1.0, "b": 2.001}, {"a": 1.0}, {"a": 1.0, "b": float("nan")}])
def test_vs_trl_refuses_sides_that_compute_something_else(
    norms: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    compare_steps = importlib.import_module("vs_trl").compare_steps
    same = {"loss": 0.5, "norms": {"a": 1.0, "b": 2.0}}
    assert compare_steps(same, same) == {"loss_difference": 0, "gradient_difference": 0}
    with pytest.raises(RuntimeError, match=r"something else|other parameters"):
        compare_steps({"loss": 0.5, "norms": norms}, same)


@pytest.fixture
def asynchrony(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module benchmarks/asynchrony.py."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("asynchrony")


def test_settings_of_rollouts_that_do_not_wait_are_accepted(asynchrony: Any) -> None:
    for comparisons in asynchrony.COMPARISONS.values():
        for runs in comparisons.values():
            for arguments in runs.values():
                validate(composed(*asynchrony.COMMON, *arguments), here=False)
    curves = importlib.import_module("_staleness_curves")
    for settings in curves.SETTINGS.values():
        validate(composed(*curves.COMMON, *curves.MODELS["tiny"], *settings), here=False)


def test_a_few_responses_are_twenty_times_the_median(asynchrony: Any) -> None:
    lengths = sorted(
        asynchrony.length_of(batch, task, run) for batch in range(1, 51) for task in range(8) for run in range(4)
    )
    assert 14 <= lengths[len(lengths) // 2] <= 18
    assert 0.002 < sum(length > 20 * asynchrony.MEDIAN for length in lengths) / len(lengths) < 0.02
    assert max(lengths) <= asynchrony.LONGEST
    assert asynchrony.length_of(3, 1, 2) == asynchrony.length_of(3, 1, 2)


def test_metrics_of_a_step_with_several_passes_are_one_row(asynchrony: Any, tmp_path: Path) -> None:
    rows = ["explore_step,time/train,time/rollout"]
    rows += [f"{step},{seconds},{step if first else ''}" for step in range(1, 6) for first, seconds in ((1, 2), (0, 3))]
    (tmp_path / "metrics.csv").write_text("\n".join(rows))
    assert asynchrony.rows_of(tmp_path) == [
        {"explore_step": step, "time/train": 5.0, "time/rollout": step} for step in (4.0, 5.0)
    ]


def test_curves_of_a_run_replace_its_earlier_ones(asynchrony: Any, tmp_path: Path) -> None:
    curves, path = importlib.import_module("_staleness_curves"), tmp_path / "curves.csv"
    row = {"model": "tiny", "setting": "k=1", "seed": 1, "step": 1, "reward": 0.1, "staleness": 0.0}
    for changes in ({}, {"seed": 2}, {"reward": 0.5}):
        curves.append(path, [row | changes])
    assert [(r["seed"], r["reward"]) for r in curves.read(path)] == [("2", "0.1"), ("1", "0.5")]
    curves.plot(curves.read(path), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
