"""A key that is not there, or a file that is no configuration: one sentence, by every way that it can come in."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.errors import MissingConfigException
from support.compose import composed
from support.errors import refuses

from trinity_lightning.config.algorithm import AlgorithmConfig
from trinity_lightning.config.engines import EngineConfig
from trinity_lightning.config.explain import CONFIG_ERRORS, _place, explain, explain_composition
from trinity_lightning.config.explorer import AuxiliaryConfig
from trinity_lightning.config.hydra import check_processes
from trinity_lightning.config.lightning_objects import check_targets
from trinity_lightning.config.run import TrainConfig, validate
from trinity_lightning.config.sections import RENAMED, section_of
from trinity_lightning.errors import ConfigError

GLOBAL = "# @package _global_\n"


def refusal(*overrides: str) -> str:
    """The sentence that refuses a run with these overrides."""
    with pytest.raises(CONFIG_ERRORS) as refused:
        checked("model=tiny", *overrides)
    return explain(refused.value)


def checked(*overrides: str) -> None:
    """Compose and check as the command does, which looks at the trainer first."""
    config = composed(*overrides)
    check_processes(config)
    validate(config)


def refused_recipe(folder: Path, text: str) -> str:
    """The sentence that refuses a recipe `mine` of that text."""
    (folder / "recipe").mkdir()
    (folder / "recipe" / "mine.yaml").write_text(text)
    return refusal(f"hydra.searchpath=[{folder}]", "+recipe=mine")


@pytest.mark.parametrize("key", RENAMED)
@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_an_old_key_is_refused_with_the_new_one(plus: str, key: str) -> None:
    assert refusal(f"{plus}{key}=1") == f"unknown key '{key}'. It is called {RENAMED[key]}."


@pytest.mark.parametrize("key", RENAMED)
def test_an_old_key_in_a_recipe_too(key: str, tmp_path: Path) -> None:
    text = GLOBAL
    for depth, name in enumerate(key.split(".")):
        text += f"{'  ' * depth}{name}:\n"
    assert f"unknown key '{key}'. It is called {RENAMED[key]}." in refused_recipe(tmp_path, text)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: AlgorithmConfig(policy_loss_args={}), "It is called algorithm.policy_loss.args"),  # type: ignore[call-arg]
        (lambda: EngineConfig(kind="vllm"), "It is called engine.name"),  # type: ignore[call-arg]
        (lambda: EngineConfig(max_seqs=3), "'engine.max_seqs'. Did you mean 'engine.max_num_seqs'"),  # type: ignore[call-arg]
        (lambda: TrainConfig(sede=3), "unknown key 'sede'. Did you mean 'seed'"),  # type: ignore[call-arg]
        (
            lambda: section_of("algorithm", AlgorithmConfig, {"policy_loss_args": {}}),
            "It is called algorithm.policy_loss.args",
        ),
        (lambda: section_of("algorithm", AlgorithmConfig, {"kl": {"coeff": 1}}), "Did you mean 'algorithm.kl.coef'"),
        (lambda: section_of("algorithm", AlgorithmConfig, {"kl": {"coef": -1}}), "^algorithm.kl.coef is -1"),
        (
            lambda: section_of("algorithm", AlgorithmConfig, {"inner_epochs": "x"}),
            "algorithm.inner_epochs is 'x': give",
        ),
        (lambda: section_of("mine", AuxiliaryConfig, {"model": "x", "url": "y"}), "^mine.url: 'y' is no URL"),
        (
            lambda: section_of("mine", AuxiliaryConfig, {"model": "x", "engine": {"name": "vlm"}}),
            "^mine: unknown engine 'vlm'. Did you mean 'vllm'",
        ),
    ],
)
def test_a_scripts_keys_are_refused_alike(made: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (f"{GLOBAL}sede: 1\n", "recipe/mine.yaml: unknown key 'sede'. Did you mean 'seed'?"),
        (f"{GLOBAL}explorer:\n  batch_sise: 1\n", "Did you mean 'explorer.batch_size'?"),
        (f"{GLOBAL}steps: many\n", "recipe/mine.yaml: steps is 'many': give a whole number."),
        ("steps: 3\n", "recipe/mine.yaml: write '# @package _global_' as its first line"),
        (f"{GLOBAL}steps: 3\n\tname: x\n", "recipe/mine.yaml, line 3: there is a tab, and YAML takes spaces only."),
        (f"{GLOBAL}steps: 3\nsteps: 4\n", "recipe/mine.yaml, line 3: the key 'steps' is there twice: leave one"),
        (f"{GLOBAL}steps: [3\n", "recipe/mine.yaml, line 3: expected ',' or ']'"),
        (f'{GLOBAL}name: "a\x01b"\n', "unacceptable character #x0001"),
        (f"{GLOBAL}- steps\n", "recipe/mine.yaml: holds a list where keys belong"),
        (f"{GLOBAL}algorithm:\n  kl: k3\n", "recipe/mine.yaml: holds 'k3' where keys belong: give {KEY: VALUE}."),
        *(
            (
                f"{GLOBAL}{group}: {name}\n",
                f"{group} has keys: a recipe chooses them in its defaults, '- override /{group}: ",
            )
            for group, name in (
                ("logger", "csv"),
                ("engine", "vllm_server"),
                ("operators", "judge"),
                ("trainer", "cpu"),
                ("trainer", "3"),
                ("callbacks", "3"),
            )
        ),
        (f"{GLOBAL}defaults:\n  - grop\n", "recipe/mine.yaml: unknown recipe 'grop'. Did you mean 'grpo'?"),
        (f"{GLOBAL}defaults:\n  - override /engine: vlm\n", "unknown engine 'vlm'. Did you mean 'vllm'?"),
    ],
)
def test_a_recipe_that_is_wrong(text: str, sentence: str, tmp_path: Path) -> None:
    message = refused_recipe(tmp_path, text)
    assert sentence in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["eval_tasksets=null", "eval_tasksets={mine: {source: addition}}"], "eval_tasksets"),
        (["eval_tasksets=null", "+eval_tasksets={mine: {source: addition}}"], "eval_tasksets"),
        (["eval_tasksets=null", "eval_tasksets.mine={source: addition}"], "eval_tasksets"),
        (["tasksets=null", "+tasksets.mine.source=addition"], "tasksets"),
        (["auxiliary_models=null", "+auxiliary_models.judge.model=tiny"], "auxiliary_models"),
    ],
)
def test_a_mapping_that_is_null_is_not_filled(overrides: list[str], key: str) -> None:
    with pytest.raises((AssertionError, AttributeError)) as refused:
        composed("+recipe=grpo", *overrides)
    assert f"{key} is null" in (explain_composition(refused.value) or "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "kind", "sentence"),
    [
        (f"{GLOBAL}defaults:\n  - mine\n".encode(), RecursionError, "lead back to the recipe itself"),
        (b"\x80\x81\x82", UnicodeDecodeError, "recipe/mine.yaml is no text: give a YAML file in UTF-8."),
    ],
)
def test_what_python_raises_of_a_recipe(content: bytes, kind: type[Exception], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_bytes(content)

    def compose_at(depth: int) -> None:
        """Compose with `depth` frames in between: they move the place where a recursion reaches its limit."""
        if depth > 0:
            compose_at(depth - 1)
        composed(f"hydra.searchpath=[{tmp_path}]", "+recipe=mine")

    for depth in range(5):
        with pytest.raises(kind) as refused:
            compose_at(depth)
        assert sentence in (explain_composition(refused.value) or "")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [ValueError, OSError, RecursionError])
def test_what_a_run_raises_is_no_error_of_its_composition(kind: Any) -> None:
    with pytest.raises(kind) as failed:
        raise kind("of a run")
    assert explain_composition(failed.value) is None


def test_a_key_of_a_recipe_of_the_package_is_named_with_its_line() -> None:
    assert re.fullmatch(r"recipe/grpo.yaml, line \d+", _place("recipe", "grpo", "explorer.batch_size"))


def test_a_key_of_a_recipe_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--config-dir", str(tmp_path), "+recipe=mine"])
    message = refused_recipe(tmp_path, f"{GLOBAL}steps: 3\nexplorer:\n  seed: 0\n  batch_sise: 1\n")
    assert message.startswith("recipe/mine.yaml, line 5: unknown key 'explorer.batch_sise'.")


@pytest.mark.parametrize("name", ["mine", "/nowhere/mine", "./mine.yaml", ""])
def test_a_recipe_that_is_not_there(name: str) -> None:
    message = refusal(f"+recipe={name}")
    assert message.startswith(f"unknown recipe '{name}'.")
    assert message.endswith("Your own is FOLDER/recipe/NAME.yaml, with --config-dir FOLDER.")


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("seed=[1", "close every bracket and quote"),
        ('name="x', "close every bracket and quote"),
        ("ckpt_path=a/epoch=2.ckpt", "mean something to Hydra: 'ckpt_path=\"a/epoch=2.ckpt\"'."),
        ("name=a=b", "quote a value with other characters that mean something to Hydra: 'name=\"a=b\"'."),
        ("seed", "give seed=VALUE, without spaces."),
        ("buffer.keep=1", "buffer.keep is '1': give true, false or a name."),
        ("algorithm.max_tokens_per_micro_batch=1.5", "is '1.5': give a whole number or a name."),
    ],
)
def test_an_override_that_cannot_be_read(override: str, fix: str) -> None:
    assert fix in refusal(override)


@pytest.mark.parametrize("path", ["3", "null", "[a.b]", "{a: b}", "..x"])
def test_a_target_that_is_no_dotted_path(path: str) -> None:
    config = composed("+recipe=grpo", "model=tiny", "logger=csv", f"logger.csv._target_={path}")
    with refuses("logger.csv._target_"):
        check_targets(config)


@pytest.mark.parametrize("plugin", ["sweeper/optuna", "launcher/joblib", "launcher/ray", "launcher/submitit_slurm"])
def test_a_plugin_of_hydra_that_is_missing_names_its_extra(plugin: str) -> None:
    error = MissingConfigException("not found", f"hydra/{plugin}", [])
    assert explain(error) == (
        f"hydra/{plugin.replace('/', '=')} is a plugin that is not installed: pip install 'trinity-lightning[sweep]'."
    )


# -- groups chosen by something else than a name -----------------------------------------------------------------------

GROUPS = ("model", "engine", "taskset", "workflow", "operators", "add_strategy", "algorithm", "buffer", "synchronizer")
GROUPS += ("trainer", "logger", "callbacks", "+recipe")


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("value", ["[1]", "[null]", "[[grpo]]", "[grpo,2]", "[{a: 1}]", "3", "1.5", "true", "null"])
def test_a_group_that_is_given_no_name_is_refused_by_its_name(group: str, value: str) -> None:
    with pytest.raises((TypeError, ValueError)) as refused:
        composed(f"{group}={value}")
    message = str(explain_composition(refused.value))
    assert message.startswith(f"{group}={value}: give the group the name of a choice, {group}=NAME")


NO_LIST_OF_CHOICES = "recipe/mine.yaml: `defaults` is a list of"
ENTRIES = ("override /algorithm: [1]", "override /algorithm: 3", "override /engine: {a: 1}", "/logger: [[csv]]")
ENTRIES += ("override /operators: [judge, null]", "override /buffer: true", "3", "null", "[grpo]", "{a: 1, b: 2}")


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_of_a_recipes_defaults_that_is_no_choice(entry: str, tmp_path: Path) -> None:
    assert said_of(tmp_path, f"{GLOBAL}defaults:\n  - {entry}\n").startswith(NO_LIST_OF_CHOICES)


@pytest.mark.parametrize("defaults", ["3", "grpo", "{a: 1}", "null", "true"])
def test_defaults_that_are_no_list(defaults: str, tmp_path: Path) -> None:
    assert said_of(tmp_path, f"{GLOBAL}defaults: {defaults}\n").startswith(NO_LIST_OF_CHOICES)


def test_a_recipe_that_is_a_number(tmp_path: Path) -> None:
    assert said_of(tmp_path, "3\n") == "recipe/mine.yaml holds no keys: give KEY: VALUE, one a line."


def said_of(folder: Path, text: str) -> str:
    """The sentence for what Hydra raises of a recipe `mine` of that text."""
    (folder / "recipe").mkdir()
    (folder / "recipe" / "mine.yaml").write_text(text)
    with pytest.raises((TypeError, ValueError, OSError)) as refused:
        composed(f"hydra.searchpath=[{folder}]", "+recipe=mine")
    return str(explain_composition(refused.value))


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("lr=1e-5", "'optimizer.lr'"),
        ("+lr=1e-5", "'optimizer.lr'"),
        ("batch_size=4", "'explorer.batch_size' or 'buffer.batch_size'"),
        ("temperature=1", "'sampling.temperature' or 'eval_sampling.temperature'"),
        ("batchsize=4", "'explorer.batch_size' or 'buffer.batch_size'"),
        ("eval_intervall=4", "'explorer.eval_interval'"),
        ("learnin_rate=1", "'optimizer.lr'"),
        ("kl=1", "'algorithm.kl'"),
        ("model.r=8", "'model.lora.r'"),
        ("explorer.lr=1", "'optimizer.lr'"),
        ("+explorer.temperature=1", "'sampling.temperature' or 'eval_sampling.temperature'"),
        ("seeds=3", "'seed'"),
        ("+recipe={a: 1}", "+recipe=NAME"),
    ],
)
def test_a_key_is_suggested_by_the_last_part_of_its_name(override: str, meant: str) -> None:
    assert f" Did you mean {meant}?" in refusal(override)
