"""Frozen parameters: what a pattern selects, what is not trained, and what is kept of a frozen tower."""

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support.errors import refuses
from support.pictures import experience, picture_groups, plain_logprobs, plain_model, prompt_of, random_picture
from support.policy import Gradients, Prepare, batch_of, fit, make_policy, optimizer_of
from torch.utils._pytree import tree_leaves

from trinity_lightning.buffer.held_out import loss_of
from trinity_lightning.common.pictures.kept import KeptStates, keep_states
from trinity_lightning.common.pictures.states import picture_inputs
from trinity_lightning.common.pictures.tensors import PictureTensors
from trinity_lightning.config.algorithm import KLConfig
from trinity_lightning.config.model import LoRAConfig, ModelConfig, OptimizerConfig
from trinity_lightning.sync.proof import perturbed
from trinity_lightning.trainer.flops import ModelSize, Work
from trinity_lightning.trainer.frozen import trained_skeleton, trained_weights
from trinity_lightning.trainer.policy import PolicyModule

TOWER, PROJECTOR = "model.vision_model.", "model.connector."
EYES = ("vision", "connector")


def frozen(*patterns: str, name: str = "tiny_vision", **model: Any) -> set[str]:
    """Names of the parameters that patterns freeze."""
    skeleton = trained_skeleton(ModelConfig(name, freeze=[*patterns], **model))
    return {name for name, parameter in skeleton.named_parameters() if not parameter.requires_grad}


def all_of(*beginnings: str) -> set[str]:
    names = [name for name, _ in trained_skeleton(ModelConfig("tiny_vision")).named_parameters()]
    return {name for name in names if name.startswith(beginnings)}


def test_a_pattern_is_whole_words_of_a_name() -> None:
    assert frozen("vision") == frozen("model.vision_model") == all_of(TOWER)
    assert frozen(*EYES) == all_of(TOWER, PROJECTOR)
    assert frozen("layers.1") == {name for name in all_of("") if ".layers.1." in name}
    assert frozen("vision*norm1.bias") == {f"{TOWER}encoder.layers.{i}.layer_norm1.bias" for i in range(2)}
    assert frozen("lm_head") == {"model.text_model.embed_tokens.weight"}  # they are tied
    assert frozen("embed_tokens", name="tiny") == {"model.embed_tokens.weight"}


def test_adapters_of_frozen_layers_are_not_trained() -> None:
    model = trained_skeleton(ModelConfig("tiny_vision", freeze=["layers.0"], lora=LoRAConfig(r=2)))
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert names
    assert all(".layers.1." in name and ".lora_" in name for name in names)


@pytest.mark.parametrize("patterns", [["visual"], ["layers.7"], ["laye"], [""], ["model"]])
def test_a_pattern_that_selects_nothing_or_all_is_refused(patterns: list[str]) -> None:
    with refuses("model.freeze"):
        frozen(*patterns)


# -- training ----------------------------------------------------------------------------------------------------------


def policy_of(*patterns: str, **settings: Any) -> PolicyModule:
    model = {"freeze": patterns, **settings.pop("model", {})}
    return make_policy(name="tiny_vision", model=model, policy_loss="reinforce", **settings)


@pytest.fixture(scope="module")
def trained_whole() -> Gradients:
    seen = Gradients()
    fit(policy_of(), [batch_of(picture_groups())], seen)
    return seen


@pytest.mark.parametrize(("patterns", "dtype"), [(("vision",), "fp32"), ((*EYES, "layers.0"), "bf16")])
def test_frozen_parameters_stay_and_have_no_gradient_master_or_moment(
    patterns: tuple[str, ...], dtype: str, trained_whole: Gradients
) -> None:
    policy, seen = policy_of(*patterns, dtype=dtype, optimizer=OptimizerConfig(lr=0.02)), Gradients()
    policy.configure_model()
    before = {name: parameter.clone() for name, parameter in policy.policy.named_parameters()}
    fit(policy, [batch_of(picture_groups())], seen)
    named = dict(policy.policy.named_parameters())
    trained = named.keys() - frozen(*patterns)
    assert {name for name in named if not torch.equal(named[name], before[name])} == trained
    assert seen.steps[0].keys() == trained
    if dtype == "fp32":
        assert seen.losses == pytest.approx(trained_whole.losses, abs=1e-6)
        for name, gradient in seen.steps[0].items():
            torch.testing.assert_close(gradient, trained_whole.steps[0][name], rtol=1e-4, atol=1e-6, msg=name)
    tensors = [leaf for leaf in tree_leaves(optimizer_of(policy).state_dict()) if isinstance(leaf, torch.Tensor)]
    copies = 2 if dtype == "fp32" else 3
    assert sum(tensor.numel() for tensor in tensors if tensor.ndim) == copies * sum(named[n].numel() for n in trained)


class Tower(L.Callback):
    """Keeps the number of pictures that each pass through the towers of policy and reference computed."""

    def __init__(self) -> None:
        self.passes: list[int] = []
        self.ends: list[int] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        for model in filter(None, (pl_module.policy, pl_module.reference)):
            model.get_encoder("image").embeddings.register_forward_hook(self._count)

    def _count(self, module: Any, arguments: Any, output: torch.Tensor) -> None:
        self.passes.append(len(output))

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.ends.append(sum(self.passes))


@pytest.mark.parametrize("patterns", [("vision",), EYES])
def test_a_frozen_tower_computes_each_picture_once_a_step(patterns: tuple[str, ...]) -> None:
    """Columns, reference, micro-batches and epochs read the same states. The drawn pictures are two."""
    policy, tower = policy_of(*patterns, kl=KLConfig(coef=0.1), optimizer_steps=2), Tower()
    batches = [batch_of(picture_groups(seed=seed)) for seed in range(2)]
    fit(policy, batches, tower, Prepare(batches), max_epochs=2)
    assert tower.ends == [2, 2]  # the columns of the first step; nothing in it
    assert tower.passes == [1, 1, 1, 1]


def test_pictures_without_room_are_computed_again() -> None:
    kept, computed = KeptStates(most_bytes=40), list[int]()

    def compute(place: int) -> torch.Tensor:
        computed.append(place)
        return torch.full((2, 3), float(place))

    for _ in range(2):
        assert [states[0, 0].item() for states in kept._all_of([7, 8], compute)] == [0.0, 1.0]
    assert computed == [0, 1, 1]
    kept.drop()
    kept._all_of([8], compute)
    assert computed == [0, 1, 1, 0]


class Drill(L.Callback):
    """Compares a probe with transformers' own forward pass while all weights are perturbed, as in the drill."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        prompt, model = prompt_of("<image>How many?", [random_picture(1)]), plain_model()
        with perturbed(pl_module.policy) as perturb:
            perturb(0.3)
            model.load_state_dict(pl_module.policy.state_dict())
            exact = plain_logprobs(model, prompt, prompt.inputs)
            torch.testing.assert_close(torch.tensor(pl_module.sequence_logprobs(prompt)), exact, rtol=0, atol=1e-5)
        self.shares = pl_module.policy.kept_states is pl_module.reference.kept_states


def test_a_probe_reads_no_kept_states() -> None:
    drill = Drill()
    fit(policy_of(*EYES, kl=KLConfig(coef=0.1)), [batch_of(picture_groups())], drill)
    assert drill.shares


def test_a_reference_with_another_tower_keeps_no_states() -> None:
    policy = policy_of(*EYES, kl=KLConfig(coef=0.1))
    policy.configure_model()
    with torch.no_grad():
        policy.reference.get_encoder("image").post_layernorm.weight.mul_(3.0)
    keep_states(policy.policy, policy.reference)
    assert not hasattr(policy.reference, "kept_states")


def test_a_later_fit_trains_a_tower_that_was_frozen_before() -> None:
    policy, seen = policy_of(*EYES, kl=KLConfig(coef=0.1)), Gradients()
    fit(policy, [batch_of(picture_groups())])
    policy.policy.requires_grad_(True)
    fit(policy, [batch_of(picture_groups(seed=1))], seen)
    assert all_of(TOWER) <= {name for name, gradient in seen.steps[0].items() if gradient.abs().sum() > 0}
    assert not hasattr(policy.policy, "kept_states")
    assert not hasattr(policy.reference, "kept_states")
    assert policy._size == ModelSize.of(policy.policy)


def test_a_copy_of_a_model_that_keeps_states_computes_its_own_tower() -> None:
    policy = policy_of("vision")
    policy.configure_model()
    keep_states(policy.policy)
    pictures = picture_inputs([PictureTensors.of_experience(picture_groups()[0])], lambda rows, tokens: tokens)
    assert pictures is not None
    before = policy.policy.kept_states.states(policy.policy, pictures)
    other = copy.deepcopy(policy.policy)
    with torch.no_grad():
        other.get_encoder("image").post_layernorm.weight.mul_(3.0)
    other.kept_states.drop()
    [after] = other.kept_states.states(other, pictures)
    assert not torch.allclose(after, before[0], atol=1e-2)
    keep_states(other)
    assert torch.equal(other.kept_states.states(other, pictures)[0], after)


class Computed(L.Callback):
    """Keeps the pictures that each step is said to have computed; examples are held out after each epoch."""

    def __init__(self) -> None:
        self.pictures: list[tuple[int, ...]] = []

    def training_flops(self, work: Work) -> int:
        self.pictures.append(work.pictures)
        return 1

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module._size = self

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        held_out = [experience(prompt_of("<image>", [random_picture(seed)]), [5]) for seed in range(70, 73)]
        loss_of(pl_module, batch_of(held_out))


def test_pictures_of_held_out_examples_are_no_work_of_the_next_step() -> None:
    computed = Computed()
    fit(policy_of(*EYES), [batch_of(picture_groups())], computed, max_epochs=2)
    assert computed.pictures == [(16, 16)] * 2


# -- a whole run's checkpoints and table -------------------------------------------------------------------------------


def items() -> list[Any]:
    return [batch_of(picture_groups(runs=1, seed=seed)) for seed in range(2)]


def test_a_run_with_a_frozen_tower_resumes_to_the_bit_and_another_freeze_is_refused(tmp_path: Path) -> None:
    undisturbed = policy_of(*EYES)
    fit(undisturbed, items(), max_epochs=2)
    fit(policy_of(*EYES), items()).save_checkpoint(tmp_path / "it.ckpt")
    resumed = policy_of(*reversed(EYES))
    fit(resumed, items(), ckpt_path=tmp_path / "it.ckpt", max_epochs=2)
    torch.testing.assert_close(dict(resumed.state_dict()), dict(undisturbed.state_dict()), rtol=0, atol=0)
    for patterns in (("vision",), ()):
        with refuses("model.freeze"):
            fit(policy_of(*patterns), items(), ckpt_path=tmp_path / "it.ckpt", max_epochs=2)


def test_the_table_at_the_start_says_what_is_trained() -> None:
    assert trained_weights(ModelConfig("tiny_vision", freeze=["vision"])) == (
        "0.375 million of 0.458 million weights; frozen: model.vision_model"
    )
    of_adapters = trained_weights(ModelConfig("tiny_vision", lora=LoRAConfig(r=2, targets=["q_proj"])))
    assert "adapters of rank 2 in 2 layers: q_proj" in of_adapters
    assert "partly frozen: model.text_model" in of_adapters
