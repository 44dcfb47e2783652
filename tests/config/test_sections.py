"""A section refuses what would train on something else than it says: from a script and from the command line alike."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from support.compose import composed
from support.errors import refuses

from trinity_lightning.config.algorithm import AlgorithmConfig, KLConfig, RolloutCorrectionConfig
from trinity_lightning.config.buffer import BufferConfig, HeldOutConfig
from trinity_lightning.config.engines import EngineConfig, SynchronizerConfig
from trinity_lightning.config.explorer import DynamicTimeoutConfig, ExplorerConfig, OverRolloutConfig, SamplingConfig
from trinity_lightning.config.model import OptimizerConfig
from trinity_lightning.config.run import validate
from trinity_lightning.config.taskset import TasksetConfig
from trinity_lightning.errors import ConfigError
from trinity_lightning.trainer.policy import PolicyModule

NAN = float("nan")
REFUSED: list[tuple[Callable[..., Any], str, Any]] = [
    *((AlgorithmConfig, "algorithm.max_grad_norm", value) for value in (-1.0, 0.0, NAN)),
    *((AlgorithmConfig, "algorithm.entropy_coef", value) for value in (-0.1, NAN)),
    (AlgorithmConfig, "algorithm.optimizer_steps", 0),
    (AlgorithmConfig, "algorithm.inner_epochs", 0),
    *((AlgorithmConfig, "algorithm.max_tokens_per_micro_batch", value) for value in (0, "all")),
    (AlgorithmConfig, "algorithm.loss_agg_mode", "tokens-mean"),
    (ExplorerConfig, "explorer.reward_workers", -1),
    *((ExplorerConfig, "explorer.reward_timeout", value) for value in (0.0, NAN)),
    *((KLConfig, "algorithm.kl.coef", value) for value in (-0.1, NAN)),
    *((RolloutCorrectionConfig, "algorithm.rollout_correction.low", value) for value in (-1.0, NAN, 3.0)),
    (RolloutCorrectionConfig, "algorithm.rollout_correction.level", "tokn"),
    *((RolloutCorrectionConfig, "algorithm.rollout_correction.high", value) for value in (-1.0, 0.0, NAN)),
    (RolloutCorrectionConfig, "algorithm.rollout_correction.mode", "clip"),
    *((OptimizerConfig, "optimizer.lr", value) for value in (-1.0, NAN, float("inf"))),
    *((OptimizerConfig, "optimizer.eps", value) for value in (-1.0, 0.0, NAN)),
    *((OptimizerConfig, "optimizer.weight_decay", value) for value in (-1.0, NAN)),
    *((OptimizerConfig, "optimizer.betas", value) for value in ([NAN, 0.9], [1.5, 2.0], [0.9])),
    (OptimizerConfig, "optimizer.lr_scheduler", "cosin"),
    (OptimizerConfig, "optimizer.total_steps", 0),
    (EngineConfig, "engine.kv_cache_gb", -1.0),
    (SynchronizerConfig, "synchronizer.sync_timeout", 0.0),
    (SamplingConfig, "sampling.top_p", 1.5),
    (ExplorerConfig, "explorer.batch_size", 0),
    (DynamicTimeoutConfig, "explorer.dynamic_timeout.ratio", 2.0),
]
# Of the same sections: one case of each from the command line is enough.
RANGES: list[tuple[Callable[..., Any], str, Any]] = [
    *((EngineConfig, "engine.kv_cache_gb", value) for value in (-1.0, 0.0, NAN)),
    *((EngineConfig, f"engine.{key}", 0) for key in ("max_model_len", "max_num_seqs", "servers", "cpu_cores")),
    (EngineConfig, "engine.gpus", [1, 1]),
    *((SynchronizerConfig, "synchronizer.sync_timeout", value) for value in (0.0, NAN)),
    (SynchronizerConfig, "synchronizer.check_interval", 0),
    (SynchronizerConfig, "synchronizer.method", "ncll"),
    *((SamplingConfig, "sampling.temperature", value) for value in (-1.0, NAN)),
    *((SamplingConfig, "sampling.top_p", value) for value in (0.0, 1.5, NAN)),
    *((SamplingConfig, "sampling.min_p", value) for value in (-0.1, 1.5, NAN)),
    *((SamplingConfig, f"sampling.{key}_penalty", value) for key in ("presence", "frequency") for value in (-3.0, NAN)),
    *((SamplingConfig, "sampling.repetition_penalty", value) for value in (0.0, NAN)),
    (SamplingConfig, "sampling.max_tokens", 0),
    (SamplingConfig, "sampling.top_k", 0),
    *((ExplorerConfig, f"explorer.{key}", 0) for key in ("batch_size", "repeat_times", "runner_per_model")),
    *((ExplorerConfig, f"explorer.{key}", 0) for key in ("max_repeat_times_per_runner", "sync_interval")),
    *((ExplorerConfig, f"explorer.{key}", -1) for key in ("max_retry_times", "max_refills", "sync_offset", "seed")),
    *((ExplorerConfig, "explorer.max_timeout", value) for value in (0.0, NAN)),
    (ExplorerConfig, "explorer.eval_interval", -1),
    (ExplorerConfig, "explorer.runner", "locl"),
    (ExplorerConfig, "explorer.ray_address", "auto"),
    *((OverRolloutConfig, "explorer.over_rollout.ratio", value) for value in (-0.1, 1.0, NAN)),
    *((OverRolloutConfig, "explorer.over_rollout.wait_after_min", value) for value in (-1.0, NAN, 5.0)),
    *((DynamicTimeoutConfig, "explorer.dynamic_timeout.ratio", value) for value in (0.5, NAN, 2.0)),
    *((DynamicTimeoutConfig, "explorer.dynamic_timeout.warmup_min_steps", value) for value in (-1, 3)),
]


@pytest.mark.parametrize(("section", "key", "value"), RANGES)
def test_a_section_knows_its_ranges(section: Callable[..., Any], key: str, value: Any) -> None:
    with refuses(key):
        section(**{key.rpartition(".")[2]: value})


@pytest.mark.parametrize(
    ("section", "key"),
    [(EngineConfig, "engine.kv_cache_gb"), (SynchronizerConfig, "synchronizer.sync_timeout")],
)
@pytest.mark.parametrize("value", [-1.0, 0.0, NAN, float("inf")])
def test_every_refusal_of_a_value_names_the_same_range(section: Callable[..., Any], key: str, value: float) -> None:
    with refuses(key) as refused:
        section(**{key.rpartition(".")[2]: value})
    assert str(refused.value).startswith(f"{key} is {value}: give a finite number above 0")


@pytest.mark.parametrize(("section", "key", "value"), REFUSED)
def test_a_section_refuses_the_value_however_it_is_given(section: Callable[..., Any], key: str, value: Any) -> None:
    with refuses(key) as in_a_script:
        section(**{key.rpartition(".")[2]: value})
    config = composed("+recipe=grpo", "model=tiny", f"{key}={value}")
    with refuses(key) as from_the_command_line:
        validate(config)
    assert str(from_the_command_line.value) == str(in_a_script.value)


@pytest.mark.parametrize(
    ("section", "arguments", "refusal"),
    [
        (ExplorerConfig, {"batch_size": "8"}, "explorer.batch_size is '8': give a whole number from 1 to 100000."),
        (
            ExplorerConfig,
            {"repeat_times": None},
            "explorer.repeat_times is None: give a whole number from 1 to 100000.",
        ),
        (AlgorithmConfig, {"entropy_coef": True}, "algorithm.entropy_coef is True: give a finite number of 0 or more."),
        (AlgorithmConfig, {"max_grad_norm": "1"}, "max_grad_norm is '1': give a finite number above 0, or null."),
        (SamplingConfig, {"top_p": 1.5}, "sampling.top_p is 1.5: give a number above 0, at most 1, or null."),
        (SamplingConfig, {"min_p": -0.5}, "sampling.min_p is -0.5: give a number from 0 to 1, or null."),
        (HeldOutConfig, {"interval": 0}, "buffer.dataset.held_out.interval is 0: give a whole number of 1 or more."),
        (HeldOutConfig, {"share": 5.0}, "held_out.share is 5.0: give a number above 0, at most 0.9, or null."),
        (BufferConfig, {"reuse_limit": 0}, "buffer.reuse_limit is 0: give a whole number of 1 or more, or null."),
        (BufferConfig, {"decay": 1.5}, "buffer.decay is 1.5: give a number above 0, at most 1."),
        (BufferConfig, {"use_decay": 0.0}, "buffer.use_decay is 0.0: give a number above 0, at most 1."),
    ],
)
def test_a_script_that_gives_another_type_is_refused_too(
    section: Callable[..., Any], arguments: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(refusal)):
        section(**arguments)


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"ratio": 1.5}, "explorer.over_rollout.ratio"),
        ({"rate": 0.5}, "explorer.over_rollout.rate"),
        (3, "explorer.over_rollout"),
    ],
)
def test_a_section_within_one_is_checked_if_a_script_gives_it_as_a_mapping(section: Any, key: str) -> None:
    assert ExplorerConfig(over_rollout={"ratio": 0.5}).over_rollout == OverRolloutConfig(0.5)  # type: ignore[arg-type]
    with refuses(key):
        ExplorerConfig(over_rollout=section)


def test_a_section_changed_after_it_was_made_is_refused_by_the_policy() -> None:
    algorithm, optimizer = AlgorithmConfig(), OptimizerConfig()
    algorithm.max_grad_norm = -1.0
    with refuses("algorithm.max_grad_norm"):
        PolicyModule("tiny", algorithm)
    optimizer.lr = -1.0
    with refuses("optimizer.lr"):
        PolicyModule("tiny", optimizer=optimizer)


def test_a_misspelt_key_is_refused_by_the_policy() -> None:
    with refuses("algorithm.max_gradnorm") as refused:
        PolicyModule("tiny", {"max_gradnorm": 1.0})
    assert "'algorithm.max_grad_norm'" in str(refused.value)
    with refuses("optimizer.lr"):
        PolicyModule("tiny", optimizer={"lr": "fast"})


def test_null_never_clips_and_weights_may_be_unbounded() -> None:
    assert AlgorithmConfig(max_grad_norm=None).max_grad_norm is None
    assert RolloutCorrectionConfig(high=float("inf")).high == float("inf")


@pytest.mark.parametrize("section", [BufferConfig, TasksetConfig])
def test_a_name_on_the_hub_may_have_dots_and_a_file_has_a_known_suffix(section: Callable[..., Any]) -> None:
    kind = {"storage": "dataset"} if section is BufferConfig else {"name": "it", "source": "dataset"}
    for name in ("allenai/llama-3.1-tulu-3-8b-preference-mixture", "gsm8k", "org/v1.5"):
        assert section(**kind, path=name).path == name
    key = "buffer.path" if section is BufferConfig else "taskset.path"
    for path in ("no.jsonl", "org/no.parquet", "./org/v1.5", "~/v1.5", "/no/where", "data/org/v1.5"):
        with refuses(key) as refused:
            section(**kind, path=path)
        assert f"'{path}'" in str(refused.value)
