"""The optimizer and its schedule: AdamW, AdamW in 8 bits, and others by name."""

from collections.abc import Iterator
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compose import composed
from support.errors import refuses
from support.policy import Gradients, batch_of, fit, make_experiences, make_policy, optimizer_of, rate_of
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    MambaConfig,
    MambaForCausalLM,
    get_scheduler,
)

from trinity_lightning.config.model import OptimizerConfig
from trinity_lightning.config.registry import PARTS
from trinity_lightning.config.run import validate
from trinity_lightning.errors import ConfigError
from trinity_lightning.trainer.host import HostMemory, moments_of
from trinity_lightning.trainer.masters import MasterWeights
from trinity_lightning.trainer.optim import learning_rate_schedule, optimizer_factory, parameter_groups
from trinity_lightning.trainer.policy import PolicyModule

LR = 1e-2

# -- schedules ---------------------------------------------------------------------------------------------------------


def halving(optimizer: torch.optim.Optimizer, num_warmup_steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5 ** max(step - num_warmup_steps, 0))


def rates(schedule: Any, steps: int = 6) -> list[float]:
    history = []
    for _ in range(steps):
        history.append(schedule.get_last_lr()[0])
        schedule.optimizer.step()
        schedule.step()
    return history


def sgd(lr: float = 1.0) -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)


@pytest.mark.parametrize("name", PARTS["schedule"])
def test_a_schedule_is_that_of_transformers(name: str) -> None:
    config = OptimizerConfig(lr_scheduler=name, warmup_steps=0 if name == "constant" else 2, total_steps=8)
    expected = get_scheduler(name, sgd(), config.warmup_steps, config.total_steps)
    assert rates(learning_rate_schedule(sgd(), config), 8) == rates(expected, 8)


def test_a_schedule_of_ones_own() -> None:
    config = OptimizerConfig(lr_scheduler=f"{__name__}.halving", warmup_steps=2)
    assert rates(learning_rate_schedule(sgd(), config), 5) == [1.0, 1.0, 1.0, 0.5, 0.25]


def test_a_schedule_that_ends_needs_to_know_when() -> None:
    with pytest.raises(ValueError, match="total_steps"):
        learning_rate_schedule(sgd(), OptimizerConfig(lr_scheduler="linear"))


def test_a_schedule_of_torch_by_its_dotted_path() -> None:
    for kind, args in ((CosineAnnealingLR, {"T_max": 4}), (StepLR, {"step_size": 2, "gamma": 0.5})):
        config = OptimizerConfig(lr_scheduler={"name": f"torch.optim.lr_scheduler.{kind.__name__}", "args": args})
        assert rates(learning_rate_schedule(sgd(), config)) == rates(kind(sgd(), **args))


def test_a_schedule_of_rate_and_momentum_reaches_the_masters() -> None:
    args = {"max_lr": LR, "total_steps": 20}
    config = OptimizerConfig(lr=LR, lr_scheduler={"name": "torch.optim.lr_scheduler.OneCycleLR", "args": args})
    policy = make_policy(config, "bf16")
    fit(policy, [batch_of(make_experiences(seed=seed)) for seed in range(2)])
    (group, _), (inner, _) = optimizer_of(policy).param_groups, optimizer_of(policy).optimizer.inner.param_groups
    assert 0.85 < group["betas"][0] < inner["betas"][0] < 0.95  # the next step's, and the last step's
    assert inner["lr"] < group["lr"] < LR


def of_torch(name: str, **args: Any) -> dict[str, Any]:
    return {"name": f"torch.optim.lr_scheduler.{name}", "args": args}


# -- what weight decay is for: matrices, and nothing else; through the masters of bfloat16 weights too -----------------


DECAY = 0.5


def is_matrix(name: str) -> bool:
    return not any(part in name for part in ("embed", "norm", "bias"))


def untied() -> Any:
    """A model with biases, and a head of its own."""
    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1)
    config.attention_bias, config.tie_word_embeddings = True, False
    return AutoModelForCausalLM.from_config(config)


def test_the_groups_are_all_trained_parameters_once() -> None:
    model = untied()
    names = {id(p): name for name, p in model.named_parameters()}
    model.model.norm.weight.requires_grad_(False)
    model.model.layers[0].mlp.up_proj.weight._no_weight_decay = True
    matrices, others = ([names.pop(id(p)) for p in group["params"]] for group in parameter_groups(model))
    assert list(names.values()) == ["model.norm.weight"]
    assert len(matrices) == 7
    assert "lm_head.weight" in matrices
    assert all(map(is_matrix, matrices))
    assert "model.layers.0.mlp.up_proj.weight" in others
    assert not any(is_matrix(name) for name in others if "up_proj" not in name)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_only_matrices_decay(dtype: str) -> None:
    """A step with decay is the step without it, and decay of the matrices beside it."""
    stepped: list[dict[str, torch.Tensor]] = []
    start: dict[str, torch.Tensor] = {}
    for decay in (0.0, DECAY):
        policy = make_policy(OptimizerConfig(lr=LR, weight_decay=decay), dtype=dtype)
        policy.configure_model()
        start = {name: p.detach().float().clone() for name, p in policy.policy.named_parameters()}
        fit(policy, [batch_of(make_experiences())], Gradients())
        stepped.append({name: p.detach().float() for name, p in policy.policy.named_parameters()})
    without, decayed = stepped
    tolerance = 1e-6 if dtype == "fp32" else 1e-2
    for name, parameter in start.items():
        expected = without[name] - (LR * DECAY * parameter if is_matrix(name) else 0.0)
        torch.testing.assert_close(decayed[name], expected, rtol=tolerance, atol=tolerance / 10)
        if not is_matrix(name):
            assert torch.equal(decayed[name], without[name]), name
    assert not any(torch.equal(decayed[name], without[name]) for name in start if is_matrix(name))


def test_an_optimizer_of_ones_own_is_given_the_groups() -> None:

    def factory(groups: Any) -> torch.optim.SGD:
        return torch.optim.SGD(groups, lr=LR, weight_decay=DECAY)

    policy = make_policy(model={"optimizer_factory": factory})
    policy.configure_model()
    optimizer = policy.configure_optimizers()["optimizer"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [DECAY, 0.0]
    assert all(isinstance(p, nn.Parameter) for group in optimizer.param_groups for p in group["params"])


@pytest.mark.filterwarnings("ignore:.*fast path.*")
def test_state_matrices_and_rows_of_biases_do_not_decay() -> None:
    """Two-dimensional parameters that are no matrices of a linear map, in models of transformers."""
    mamba = MambaForCausalLM(MambaConfig(vocab_size=16, hidden_size=8, state_size=4, num_hidden_layers=1))
    config = GptOssConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_local_experts=2)
    config.num_attention_heads = config.num_key_value_heads = 2
    config.head_dim = 4
    for model, exempt in ((mamba, {"A_log"}), (GptOssForCausalLM(config), {"gate_up_proj_bias", "down_proj_bias"})):
        names = {id(p): name.rsplit(".", 1)[-1] for name, p in model.named_parameters()}
        matrices, others = ([(names[id(p)], p.ndim) for p in group["params"]] for group in parameter_groups(model))
        assert exempt <= {name for name, dimensions in others if dimensions == 2}
        assert {name for name, _ in matrices} <= {"weight", "gate_up_proj", "down_proj"}


def test_a_norm_does_not_decay_whatever_its_shape() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm([2, 4]))
    matrices, others = ([p.shape for p in group["params"]] for group in parameter_groups(model))
    assert matrices == [(4, 4)]
    assert sorted(others) == [(2, 4), (2, 4), (4,)]


# -- other optimizers by name ------------------------------------------------------------------------------------------

NEEDS_TORCHAO = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao (extra dev) is not installed")


class Signs(torch.optim.Optimizer):
    """A user's own: steps of the gradient's sign, without weight decay."""

    def __init__(self, params: Any, lr: float, slower: float = 1.0) -> None:
        super().__init__(params, {"lr": lr / slower})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad.sign())


class Opaque(Signs):
    """Has an object in its state that no checkpoint gives back."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "share": Fraction(1, 3)}


class Bare(Signs):
    """Takes no closure, as its `step` says; Lightning hands it one."""

    def step(self) -> None:  # type: ignore[override]
        super().step()


def decaying(params: Any, lr: float, **settings: Any) -> torch.optim.AdamW:
    """A user's own, which hands on what it does not know."""
    return torch.optim.AdamW(params, lr=lr, **settings)


def signs_of(params: Any, lr: float, **settings: Any) -> Signs:
    """A user's own, which hands on what it does not know to what has no decay."""
    return Signs(params, lr=lr, **settings)


@pytest.fixture
def eager() -> Iterator[None]:
    """Without the compiler that an update in 8 bits is for: the same numbers, at once."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


CASES: list[dict[str, Any]] = [
    {"name": "torch.optim.SGD", "args": {"momentum": 0.9, "nesterov": True}},
    {"name": "torch.optim.Adafactor"},
    {"name": f"{__name__}.Signs", "args": {"slower": 2.0}},
    {"name": "adamw_8bit", "weight_decay": 0.1},
]
NAMED = [pytest.param(case, id=case["name"], marks=[NEEDS_TORCHAO] if "8bit" in case["name"] else []) for case in CASES]


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("settings", NAMED)
def test_a_run_goes_on_from_a_checkpoint_to_the_bit(settings: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    config = OptimizerConfig(**settings, lr=LR, lr_scheduler="linear", total_steps=8)
    batches = [batch_of(make_experiences(seed=seed)) for seed in range(2)]
    policy, resumed = make_policy(config, dtype), make_policy(config, dtype)
    fit(policy, batches, max_epochs=2)
    fit(make_policy(config, dtype), batches).save_checkpoint(tmp_path / "it.ckpt")
    fit(resumed, batches, ckpt_path=tmp_path / "it.ckpt", max_epochs=2)
    assert float(rate_of(resumed)) == float(rate_of(policy)) == pytest.approx(LR / 2 / config.args.get("slower", 1))
    assert all(map(torch.equal, policy.policy.parameters(), resumed.policy.parameters()))
    mine, theirs = (tree_leaves(optimizer_of(trained).state_dict()["state"]) for trained in (policy, resumed))
    assert all(a.equal(b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(mine, theirs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_by_its_dotted_path_steps_over_float32_with_decay_of_matrices_alone(dtype: str) -> None:
    config = OptimizerConfig(name="torch.optim.SGD", lr=LR, weight_decay=0.5)

    def factory(groups: Any) -> torch.optim.SGD:
        return torch.optim.SGD(groups, lr=LR, weight_decay=0.5)

    made = {
        "named": make_policy(config, dtype),
        "factory": make_policy(dtype=dtype, model={"optimizer_factory": factory}),
    }
    for policy in made.values():
        fit(policy, [batch_of(make_experiences())])
    optimizer = optimizer_of(made["named"])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    assert isinstance(optimizer.optimizer, MasterWeights) == (dtype == "bf16")
    assert all(map(torch.equal, made["named"].policy.parameters(), made["factory"].policy.parameters()))


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_weight_decay_reaches_an_optimizer_that_takes_it_by_any_keyword(decay: float) -> None:
    make = optimizer_factory(OptimizerConfig(name=f"{__name__}.decaying", lr=LR, weight_decay=decay))
    (group,) = make([nn.Parameter(torch.zeros(2, 2))]).param_groups
    assert group["weight_decay"] == decay


def test_no_weight_decay_is_left_out_for_a_factory_of_what_has_none() -> None:
    make = optimizer_factory(OptimizerConfig(name=f"{__name__}.signs_of", lr=LR))
    assert type(make([nn.Parameter(torch.zeros(2, 2))])) is Signs


# -- moments in 8 bits -------------------------------------------------------------------------------------------------


def stepped(config: OptimizerConfig, masters: bool, steps: int) -> tuple[nn.Parameter, Any, list[torch.Tensor]]:
    """A matrix after so many steps, its optimizer, and where the matrix was."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(64, 128, generator=generator)
    matrix = nn.Parameter(weights.bfloat16() if masters else weights)
    make = optimizer_factory(config)
    optimizer = MasterWeights([matrix], make) if masters else make([matrix])
    places = []
    for _ in range(steps):
        matrix.grad = torch.randn(64, 128, generator=generator)
        optimizer.step()
        places.append((optimizer.masters[0] if isinstance(optimizer, MasterWeights) else matrix).detach().clone())
    return matrix, optimizer, places


@pytest.mark.slow  # torch asks g++ for its version
@NEEDS_TORCHAO
@pytest.mark.usefixtures("eager")
def test_eight_bits_train_as_float32_does_and_take_a_quarter() -> None:
    ways = {}
    for name in ("adamw", "adamw_8bit"):
        _, optimizer, places = stepped(OptimizerConfig(name=name, lr=LR, weight_decay=0.1), masters=True, steps=10)
        ways[name] = sum(moment.nbytes for moment in moments_of(optimizer)), places
    (size, exact), (small, near) = ways.values()
    assert size == 2 * 4 * 64 * 128
    assert small < 0.3 * size  # codes, scales of 256 each, and a table of codes a moment
    assert (near[0] - exact[0]).abs().max() < 1e-2 * LR  # the first step is of moments before they are rounded
    moved = exact[-1] - exact[0]
    assert (near[-1] - exact[-1]).norm() < 0.1 * moved.norm()


@pytest.mark.slow  # torch asks g++ for its version
@NEEDS_TORCHAO
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("masters", [True, False])
def test_eight_bits_leave_for_the_host_and_come_back(masters: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    config = OptimizerConfig(name="adamw_8bit", lr=LR)
    stay, staying, _ = stepped(config, masters, steps=2)
    assert caplog.text.count("the first step compiles an update") == 1
    leave, leaving, _ = stepped(config, masters, steps=2)
    memory = HostMemory(leaving)
    memory.leave()
    memory.come_back()
    for matrix, optimizer in ((stay, staying), (leave, leaving)):
        matrix.grad = torch.ones(64, 128)
        optimizer.step()
    assert torch.equal(stay, leave)


# -- refused before anything is loaded ---------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"name": "adamww"}, "optimizer.name"),
    "no optimizer": ({"name": "torch.nn.Linear", "args": {"out_features": 2}}, "optimizer.name"),
    "a value": ({"name": "torch.optim.SGD", "args": {"momentum": -1.0}}, "optimizer.name"),
    "a text for a number": ({"name": "torch.optim.SGD", "args": {"momentum": "abc"}}, "optimizer.name"),
    "no decay": ({"name": f"{__name__}.Signs", "weight_decay": 0.1}, "optimizer.name"),
    "its rate": ({"name": "torch.optim.SGD", "args": {"lr": 0.1}}, "optimizer.args"),
    "betas of another": ({"name": "torch.optim.SGD", "betas": [0.8, 0.9]}, "optimizer.betas"),
    "args of adamw": ({"args": {"amsgrad": True}}, "optimizer.args"),
    "a closure": ({"name": "torch.optim.LBFGS"}, "optimizer.name"),
    "no closure": ({"name": f"{__name__}.Bare"}, "optimizer.name"),
    "matrices alone": ({"name": "torch.optim.Muon"}, "optimizer.name"),
    "sparse": ({"name": "torch.optim.SparseAdam"}, "optimizer.name"),
    "a state of objects": ({"name": f"{__name__}.Opaque"}, "optimizer.name"),
    "a schedule's argument": ({"lr_scheduler": of_torch("StepLR", step=2)}, "optimizer.lr_scheduler"),
    "a schedule's missing argument": ({"lr_scheduler": of_torch("StepLR")}, "optimizer.lr_scheduler"),
    "a schedule of the loss": ({"lr_scheduler": of_torch("ReduceLROnPlateau")}, "optimizer.lr_scheduler"),
    "a combination of arguments": ({"lr_scheduler": of_torch("OneCycleLR", max_lr=LR)}, "optimizer.lr_scheduler"),
    "a schedule of 0": (
        {"lr_scheduler": of_torch("ConstantLR", factor=0.0, total_iters=9), "total_steps": 4},
        "optimizer.lr_scheduler",
    ),
    "a rate of 0 that the schedule keeps": (
        {"lr": 0.0, "lr_scheduler": of_torch("StepLR", step_size=2), "total_steps": 4},
        "optimizer.lr_scheduler",
    ),
    "no warm-up": ({"lr_scheduler": of_torch("ConstantLR"), "warmup_steps": 2}, "optimizer.lr_scheduler"),
    "built-in schedule's argument": (
        {"lr_scheduler": {"name": "cosine", "args": {"cycles": 2}}},
        "optimizer.lr_scheduler",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_train_is_refused(case: str) -> None:
    settings, key = REFUSED[case]
    with refuses(key):
        PolicyModule("tiny", optimizer={"lr": LR} | settings)


@pytest.mark.parametrize(("name", "args", "meant"), [("SDG", {}, "SGD"), ("SGD", {"momentom": 0.9}, "momentum")])
def test_a_misspelt_name_is_refused_by_what_was_meant(name: str, args: dict[str, Any], meant: str) -> None:
    with pytest.raises(ConfigError, match=meant):
        PolicyModule("tiny", optimizer={"name": f"torch.optim.{name}", "lr": LR, "args": args})


def test_no_learning_rate_is_warned_of_unless_the_schedule_may_have_its_own(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = {"name": "torch.optim.lr_scheduler.OneCycleLR", "args": {"max_lr": LR, "total_steps": 2}}
    PolicyModule("tiny", optimizer={"lr": 0.0, "lr_scheduler": scheduler, "total_steps": 2})
    config = {"lr": 0.0, "lr_scheduler": of_torch("StepLR", step_size=2), "total_steps": 2}
    PolicyModule("tiny", {"critic": {}}, config)  # the critic has its own
    assert not caplog.messages
    PolicyModule("tiny", optimizer={"lr": 0.0, "lr_scheduler": "cosine", "warmup_steps": 1})
    assert caplog.messages == ["optimizer.lr is 0: the policy's weights do not change."]


def test_eight_bits_without_torchao_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refuses("optimizer.name") as refused:
        OptimizerConfig(name="adamw_8bit")
    assert refused.value.fix == "pip install 'trinity-lightning[optim]'"


def test_from_the_command_line_arguments_need_no_plus_sign() -> None:
    chosen = ["optimizer.name=torch.optim.SGD", "optimizer.args.momentum=0.9"]
    chosen += ["optimizer.lr_scheduler.name=torch.optim.lr_scheduler.StepLR", "optimizer.lr_scheduler.args.step_size=2"]
    optimizer = validate(composed("+recipe=grpo", *chosen)).optimizer
    assert (optimizer.name, optimizer.args) == ("torch.optim.SGD", {"momentum": 0.9})
    assert optimizer.lr_scheduler.args == {"step_size": 2}
    assert validate(composed("+recipe=grpo", "optimizer.lr_scheduler=cosine")).optimizer.lr_scheduler.name == "cosine"
