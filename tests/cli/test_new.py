"""`trinity-lightning new` and `check`: a project that works as it is written, and a look at it before it is trained."""

import re
import resource
import shlex
import subprocess
import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.compose import composed
from support.errors import refuses
from support.policy import make_experiences
from support.runs import ROOT, RunTrain, rows

from trinity_lightning.cli import new
from trinity_lightning.cli.check import check, register
from trinity_lightning.cli.new import main, next_steps, write_project
from trinity_lightning.cli.trial import Trial, hints, problems, shortened, wilson
from trinity_lightning.config.run import typed_config
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.trainer.objective import Objective

ARGUMENTS = ("--config-dir", "conf", "+recipe=mine")
# What the tiny model can do within seconds.
TINY = ("model=tiny", "engine=transformers", "logger=csv", "explorer.repeat_times=4", "sampling.max_tokens=8")
WITH_SIGNAL = "reward={contains_digits: 1, my_reward.plural: 1}"  # random letters have no other
CHECK = "trinity_lightning.cli.check"

# -- new ---------------------------------------------------------------------------------------------------------------


def test_files_have_the_projects_name_and_no_names_of_modules(tmp_path: Path) -> None:
    written = write_project(tmp_path / "some" / "where else")
    assert {path.relative_to(tmp_path / "some" / "where else").as_posix() for path in written} == {
        "README.md",
        "conf/recipe/mine.yaml",
        "my_reward.py",
        "test_my_reward.py",
        "tasks/heldout.jsonl",
        "tasks/train.jsonl",
    }
    recipe = yaml.safe_load((tmp_path / "some/where else/conf/recipe/mine.yaml").read_text())
    assert recipe["name"] == "where_else"
    assert not any(new.NAME in path.read_text() for path in written)
    modules = [path.stem for path in written if path.suffix == ".py"]
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    assert [name for name in modules if PathFinder.find_spec(name, installed)] == []


def test_no_held_out_task_is_trained_on() -> None:
    trained, heldout = ((new.FILES / "tasks" / f"{name}.jsonl").read_text() for name in ("train", "heldout"))
    assert len(trained.splitlines()) == 10
    assert not set(trained.splitlines()) & set(heldout.splitlines())


def test_an_empty_folder_and_this_one_can_be_a_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["."])
    assert (tmp_path / "my_reward.py").is_file()
    assert "    cd " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("full", "is not empty"),
        ("full/file", "is a file"),
        ("full/file/project", "Not a directory"),
        ("recipe=grpo", "is no name for a folder"),
        ("...", "is no name for a folder"),
        ("a\nb", "is no name for a folder"),
        ("n" * 300, "File name too long"),
    ],
)
def test_what_cannot_be_a_project_is_refused(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("full/file").touch()
    with pytest.raises(SystemExit) as end:
        main([name])
    assert end.value.code == 2
    refusal = capsys.readouterr().err
    assert words in refusal
    assert refusal.startswith("trinity-lightning new: ")
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "file"]


def test_a_project_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))
    try:
        with pytest.raises(ConfigError, match="File too large"):
            write_project(tmp_path / "a" / "b")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


# -- the printed steps, and check --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def project(run_train: RunTrain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project in a folder with a blank in its name, which the printed commands have to quote."""
    folder = tmp_path_factory.mktemp("projects")
    done = run_train(folder, "new", "first one")
    assert done.returncode == 0, done.stdout
    change, *commands = [line.strip() for line in done.stdout.partition("next:")[2].splitlines()[1:]]
    assert shlex.split(change) == ["cd", "first one"]
    assert [shlex.split(command)[-len(words) :] for command, words in zip(commands, NEXT, strict=True)] == NEXT
    return folder / "first one"


NEXT = [
    ["check", *ARGUMENTS],
    [*ARGUMENTS],
    ["evaluate", *ARGUMENTS, "ckpt_path=last", "eval_repeat_times=8"],
]


@pytest.mark.slow
def test_the_tests_of_the_reward_pass(project: Path) -> None:
    done = subprocess.run(
        [sys.executable, "test_my_reward.py"], cwd=project, capture_output=True, text=True, check=True
    )
    assert done.stdout == "4 tests passed\n"


def test_the_printed_steps_work_one_after_the_other(run_train: RunTrain, project: Path) -> None:
    done = run_train(project, *NEXT[0], *TINY, "reward={my_reward.plural: 0}")
    assert done.returncode == 1, done.stdout
    assert "groups with signal: 0 of 5; in a step of 5 tasks about 0 (0 to 2)" in done.stdout
    assert "All 20 rewards are 0, so nothing would be learned." in done.stdout
    assert done.stdout.count("What is the plural of") == 5
    assert re.search(
        r"^5 of 5: reward 0 \(plural/correct 0, plural/form 0(\.2)?\), \d tokens", done.stdout, re.MULTILINE
    )
    small = (*TINY, WITH_SIGNAL, "steps=1", "eval_repeat_times=1")
    assert run_train(project, *NEXT[1], *small).returncode == 0
    [run] = project.glob("outputs/first_one/2*")
    assert float(rows(run)[0]["eval/heldout/reward/plural/form/mean@1"]) <= 0.2
    evaluated = run_train(project, *NEXT[2], *small[:-1])
    assert evaluated.returncode == 0, evaluated.stdout


@pytest.mark.parametrize("page", [new.FILES / "README.md", ROOT / "docs" / "your_own.md"], ids=["project", "docs"])
def test_pages_have_the_printed_commands(page: Path) -> None:
    """They are run by the test above; the README adds settings to the one that trains."""
    commands = re.findall(r"^    trinity-lightning (.*?)(?:  +#.*)?$", page.read_text(), re.MULTILINE)
    words = [shlex.split(command) for command in commands if "new" not in command]
    assert [word[: len(known)] for word, known in zip(words, NEXT, strict=False)] == NEXT
    assert all(word[:3] == NEXT[1] for word in words[3:])


def test_the_reward_of_the_page_gives_parts() -> None:
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "your_own.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    task = Task("simple", raw_task={"prompt": "Name a city in Peru.", "answer": ["Lima", "Cusco"]})
    assert names["city"]("Cusco.", task) == {"correct": 1.0, "brief": 0.2}
    assert names["city"]("I would say that it is Paris.", task) == {"correct": 0.0, "brief": 0.0}


def test_check_finds_signal_and_prints_the_command_of_the_run(run_train: RunTrain, project: Path) -> None:
    """As if by the run itself: the same first step, weighed by the same strategy."""
    arguments = (*ARGUMENTS, *TINY, WITH_SIGNAL)
    done = run_train(project, *arguments, "check.tasks=3", "hydra.run.dir=checked", program=CHECK)
    assert done.returncode == 0, done.stdout
    assert "- plural/correct is 0 for every completion" in done.stdout
    [command] = [line.partition("Train: ")[2] for line in done.stdout.splitlines() if "Train: " in line]
    assert shlex.split(command) == ["trinity-lightning", *arguments]
    records = (project / "checked/completions/step_1.jsonl").read_text().splitlines()
    assert len(records) == 12
    trained = run_train(project, *arguments, "explorer.batch_size=3", "steps=1", "output_dir=trained")
    assert trained.returncode == 0, trained.stdout
    assert (project / "trained/completions/step_1.jsonl").read_text().splitlines() == records


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("return None", "returned None, expected a finite number (in float32) (my_reward.py:1 in plural)"),
        ("return task.raw_task['x']", "raised KeyError: 'x' (my_reward.py:2 in plural)"),
        (None, "recipe/mine.yaml, line 7: cannot import 'my_reward.plural': there is no module 'my_reward'."),
    ],
    ids=["none", "raises", "missing"],
)
def test_a_mistake_in_the_reward_is_a_sentence_with_file_and_line(
    code: str | None, sentence: str, run_train: RunTrain, tmp_path: Path
) -> None:
    write_project(tmp_path / "project")
    file = tmp_path / "project" / "my_reward.py"
    file.unlink() if code is None else file.write_text(f"def plural(response, task):\n    {code}\n")
    done = run_train(tmp_path / "project", *ARGUMENTS, *TINY, "check.tasks=2", program=CHECK)
    assert done.returncode == (2 if code is None else 1)
    assert sentence in done.stdout.splitlines()[-1]
    assert done.stdout.count(sentence) == 1
    assert "Traceback" not in done.stdout
    assert not (tmp_path / "project" / "outputs").exists()


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (("+recipe=sft", "buffer.path=x.jsonl"), "buffer.storage"),
        (("+recipe=grpo", "ckpt_path=last"), "ckpt_path"),
        (("+recipe=grpo", "check=3"), "check"),
        (("+recipe=grpo", "check.tasks=0"), "check.tasks"),
        (("+recipe=grpo", "engine=transformers", "sampling.top_k=3"), "sampling.top_k"),  # as the run itself
    ],
)
def test_what_cannot_be_checked_is_refused(arguments: tuple[str, ...], key: str) -> None:
    register()
    with refuses(key):
        check(composed(*arguments, "model=tiny", name="check"))


@pytest.mark.parametrize(
    ("arguments", "learns"),
    [
        (("+recipe=on_policy_distill_top_k", "auxiliary_models.teacher.model=tiny"), True),
        (("+recipe=grpo", "algorithm.kl.coef=0.1"), False),  # trains all completions, and by their rewards
    ],
    ids=["teacher", "kl"],
)
def test_equal_rewards_are_no_problem_for_a_policy_that_learns_from_a_teacher(
    arguments: tuple[str, ...], learns: bool, tmp_path: Path
) -> None:
    config = typed_config(composed(*arguments, "model=tiny"))
    experiences = make_experiences(8)
    for experience in experiences:
        experience.reward = 0.0
    trial = Trial(experiences, 0, Objective(config.algorithm), config, tmp_path)
    assert (problems(trial) == []) is learns


def test_a_criterion_that_names_no_part_of_the_reward_is_seen_before_training(tmp_path: Path) -> None:
    config = typed_config(composed("+recipe=grpo", "model=tiny", "reward_solved={right: 1.0}"))
    experiences = make_experiences(8)
    for number, experience in enumerate(experiences):
        experience.reward = float(number % 2)
        experience.metrics = {"reward/animal/letter": experience.reward, "reward/animal/brief": 0.0}
    for solved, seen in (({"right": 1.0}, True), ({"letter": 1.0}, False)):
        config.reward_solved = solved
        trial = Trial(experiences, 0, Objective(config.algorithm), config, tmp_path)
        assert any("reward_solved={letter: 1.0}" in sentence for sentence in hints(trial)) is seen


def test_a_folder_that_looks_like_an_option_can_be_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_project("-dash")
    assert next_steps(Path("-dash"))[0] == "cd ./-dash"


def test_text_for_a_terminal() -> None:
    assert shortened("a\x1b[31m\ud800é\n") == "a\\x1b[31m\\ud800é\n"
    assert shortened("a" * 10 + "b" * 10, most=8) == "aaaa\n... (12 characters are left out here) ...\nbbbb"


def test_the_interval_of_a_share() -> None:
    """The numbers of Wilson's interval for 0 and 3 of 5."""
    assert wilson(0, 5) == pytest.approx((0, 0.4345), abs=1e-4)
    assert wilson(3, 5) == pytest.approx((0.2307, 0.8824), abs=1e-4)
