"""The names that the package promises stay importable from where they are promised."""

import importlib
import tomllib

import pytest
from support.runs import ROOT

SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
PUBLIC = {
    "algorithm.add_strategy": (
        "ADD_STRATEGY AddStrategy GroupAdvantageStrategy GRPOAddStrategy OPMDAddStrategy RewardVarianceAddStrategy "
        "CorrectBiasAddStrategy DuplicateInformativeAddStrategy StepWiseGRPOStrategy create_add_strategy group_by"
    ),
    "algorithm.add_strategy.add_strategy": (
        "AddStrategy GroupAdvantageStrategy GRPOAddStrategy OPMDAddStrategy RewardVarianceAddStrategy group_by"
    ),
    "algorithm.add_strategy.correct_bias_add_strategy": "CorrectBiasAddStrategy",
    "algorithm.add_strategy.duplicate_add_strategy": "DuplicateInformativeAddStrategy",
    "algorithm.add_strategy.step_wise_add_strategy": "StepWiseGRPOStrategy",
    "algorithm.add_strategy.functional": "",
    "algorithm.kl": "KL_FN",
    "algorithm.policy_loss": "POLICY_LOSS_FN",
    "buffer.operators": "EXPERIENCE_OPERATORS ExperienceOperator ExperienceOperatorV1 OperatorConfig create_operators",
    "buffer.pipeline": "ExperiencePipeline",
    "common.config": (
        "AlgorithmConfig BufferConfig Dropout DynamicTimeoutConfig EngineConfig EngineDtype EngineSleep ExplorerConfig "
        "Layout LoRAConfig ModelConfig OptimizerConfig OverRolloutConfig SamplingConfig TrainConfig WeightDtype"
    ),
    "common.experience": (
        "CustomField EID Experience ExperienceError ExperienceFormatError Experiences from_hf_datasets "
        "gather_action_masks gather_attention_masks gather_experiences gather_multi_modal_inputs gather_response_attrs "
        "gather_token_ids group_by split_dpo_experience_to_single_turn to_hf_datasets"
    ),
    "config.schema": (
        "AlgorithmConfig BufferConfig EngineConfig ExplorerConfig ModelConfig OptimizerConfig SamplingConfig "
        "TasksetConfig TrainConfig WorkflowConfig"
    ),
    "evaluate": "main",
    "explorer": "Explorer ExplorerCallback RunnerWrapper Scheduler Status TaskWrapper WorkflowRunner",
    "explorer.tasks": "Task Taskset",
    "explorer.workflows": "Workflow",
    "train": "main",
    "trainer.weight_sync": "Synchronizer weight_stream",
}


@pytest.mark.parametrize("module", ["common.experience", "algorithm.add_strategy", "algorithm.policy_loss"])
def test_a_star_import_has_the_names_that_are_imported_on_use(module: str) -> None:
    names: dict[str, object] = {}
    exec(f"from trinity_lightning.{module} import *", names)
    parts = {"algorithm.add_strategy": "StepWiseGRPOStrategy GiGPOAddStrategy", "algorithm.policy_loss": "ppo sft dpo"}
    assert [name for name in f"{PUBLIC[module]} {parts.get(module, '')}".split() if name not in names] == []


@pytest.mark.parametrize("module", PUBLIC)
def test_promised_names_can_be_imported(module: str) -> None:
    imported = importlib.import_module(f"trinity_lightning.{module}")
    assert [name for name in PUBLIC[module].split() if not hasattr(imported, name)] == []


@pytest.mark.parametrize("command", SCRIPTS)
def test_an_installed_command_is_there(command: str) -> None:
    module, _, function = SCRIPTS[command].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
