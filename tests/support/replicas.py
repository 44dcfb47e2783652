"""Fits that one process and several have to do alike; `python -m support.replicas FILE` is one of the several."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from support.pictures import picture_groups
from support.policy import (
    Gradients,
    Prepare,
    assert_same_gradients,
    batch_of,
    fit,
    groups,
    local,
    make_experiences,
    make_policy,
    whole,
)
from support.runs import CUT, Commands
from support.streams import STREAMS, read
from trinity_lightning.buffer.offline import marked
from trinity_lightning.common import checkpoints
from trinity_lightning.common.experience import Experience
from trinity_lightning.config.algorithm import KLConfig
from trinity_lightning.config.model import LoRAConfig, OptimizerConfig
from trinity_lightning.errors import TrinityError
from trinity_lightning.explorer.interruption import StopCheckpoint
from trinity_lightning.sync.proof import perturbed
from trinity_lightning.sync.stream import weight_stream
from trinity_lightning.trainer import fsdp
from trinity_lightning.trainer.checkpoint import AtomicCheckpointIO
from trinity_lightning.trainer.ddp import ReplicaStrategy
from trinity_lightning.trainer.fsdp import ShardStrategy
from trinity_lightning.trainer.model import layers_of
from trinity_lightning.trainer.policy import PolicyModule

RANKS = 2
DTYPES = ("fp32", "bf16")
KINDS: dict[str, dict[str, Any]] = {dtype: {"dtype": dtype} for dtype in DTYPES}
KINDS["adapters"] = {"dtype": "bf16", "model": {"lora": LoRAConfig(r=2)}}
STRATEGIES = {"ddp": ReplicaStrategy, "fsdp2": ShardStrategy}


# Adam's own epsilon turns the last bit of a tiny gradient into a whole step.
SMOOTH = OptimizerConfig(lr=1e-3, eps=1e-4, weight_decay=0.1)


class Metrics(L.Callback):
    """Keeps what each item logged."""

    def __init__(self) -> None:
        self.items: list[dict[str, float]] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.items.append({name: float(value) for name, value in trainer.logged_metrics.items()})


class Saves(L.Callback):
    """Writes a checkpoint after the first item, of a run that goes on."""

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 1:
            with tempfile.TemporaryDirectory() as folder:
                trainer.save_checkpoint(Path(folder) / "first.ckpt")


def trained(
    items: list[list[Experience]],
    prepare: bool = False,
    callbacks: Sequence[type[L.Callback]] = (),
    change: Callable[[PolicyModule], None] = lambda policy: None,
    **settings: Any,
) -> Callable[..., dict[str, Any]]:
    """A fit of fresh weights to these items, of a policy that is changed first; what came of it."""

    def case(**trainer: Any) -> dict[str, Any]:
        batches, seen, metrics = [batch_of(item) for item in items], Gradients(), Metrics()
        policy = make_policy(**{"optimizer": SMOOTH, **settings})
        change(policy)
        others = [*([Prepare(batches)] if prepare else []), *(callback() for callback in callbacks)]
        fit(policy, batches, seen, metrics, *others, **trainer)
        model = policy.policy
        return {
            "losses": seen.losses,
            "gradients": seen.steps,
            "metrics": metrics.items,
            "held": held(policy.policy),
            "reference": 0 if policy.reference is None else held(policy.reference),
            "weights": {name: whole(model, value) for name, value in model.state_dict(keep_vars=True).items()},
        }

    return case


TIMED = ("time/", "perf/mfu", "perf/tokens_per_second", "perf/trained_tokens_per_second")


def assert_same(together: dict[str, Any], one: dict[str, Any]) -> None:
    """Losses, gradients, weights and metrics but for the order of float32 sums."""
    torch.testing.assert_close(together["losses"], one["losses"], rtol=1e-5, atol=1e-7, equal_nan=True)
    for mine, expected in zip(together["gradients"], one["gradients"], strict=True):
        assert_same_gradients(mine, expected)
    torch.testing.assert_close(together["weights"], one["weights"], rtol=1e-5, atol=1e-5)
    for mine, expected in zip(together["metrics"], one["metrics"], strict=True):
        compared = {name: value for name, value in expected.items() if not name.startswith((*TIMED, *CUT))}
        torch.testing.assert_close({name: mine[name] for name in compared}, compared, rtol=1e-5, atol=1e-6)
        assert mine.keys() == expected.keys()


def held(model: nn.Module) -> int:
    """The number of elements of the model in this process."""
    return sum(local(parameter).numel() for parameter in model.parameters())


def ragged() -> list[list[Experience]]:
    return [make_experiences(count, seed=seed, zero_every=3) for seed, count in enumerate((12, 7, 9))]


def rewarded() -> list[list[Experience]]:
    """With rewards, and without advantages, which a critic makes."""
    items = ragged()
    for row in (row for item in items for row in item):
        row.advantages, row.reward = None, float(row.eid.run)
    return items


def sparse() -> list[list[Experience]]:
    """One row, rows without advantage, nothing at all, and a row among those."""
    one, none = make_experiences(1), make_experiences(6, zero_every=1)
    return [one, none, [], [*none, *make_experiences(3, seed=4)[1:]]]


def with_pictures() -> list[list[Experience]]:
    """Ragged prompts with pictures and without, and an item with pictures for one of two ranks."""
    rows = picture_groups(runs=2)
    return [rows, [rows[0], rows[-1]], rows[-2:]]


def with_experts() -> list[list[Experience]]:
    items = ragged()
    for item in items:
        for row in item[::4]:
            item.append(marked(row, expert=True))
            item[-1].logprobs = None
    return items


def in_streams() -> list[list[Experience]]:
    """With tokens of all streams: an expert's, what a teacher has read, weights of one's own."""
    items = with_experts()
    for item in items:
        read(item)
    return items


RARE = 1  # a token


def rarely(items: int = 3) -> list[list[Experience]]:
    """RARE is in one row of each of the first items."""
    batches = ragged()
    for item in batches[:items]:
        item[1].tokens[0] = RARE
    return batches


def add_rare_vectors(policy: PolicyModule) -> None:
    """One in a layer and one in none, which RARE brings in: other micro-batches have no gradient of them."""
    policy.configure_model()
    embeddings: Any = policy.policy.get_input_embeddings()
    layer: Any = layers_of(policy.policy)[0].mlp
    tokens: dict[str, Tensor] = {}

    def add(module: Any, arguments: Any, output: Tensor) -> Tensor:
        if module is embeddings:
            tokens["rare"] = arguments[0] == RARE
        return output + tokens["rare"][..., None] * module.rare if tokens["rare"].any() else output

    for module in (embeddings, layer):
        module.rare = nn.Parameter(torch.zeros(embeddings.embedding_dim, dtype=policy.policy.dtype))
        module.register_forward_hook(add)


def broken() -> list[list[Experience]]:
    """The second item has an advantage that is not finite."""
    items = ragged()
    advantages = items[1][1].advantages
    assert advantages is not None
    items[1][1].advantages = advantages * torch.inf
    return items


class Draws(L.Callback):
    """Keeps a random number after each item."""

    def __init__(self) -> None:
        self.numbers: list[float] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.numbers.append(float(torch.rand(())))


def noise(stops: bool, strategy: ReplicaStrategy, **trainer: Any) -> dict[str, Any]:
    """The numbers that dropout would draw after each item of two epochs from the same state; `stops`: resume once."""
    torch.manual_seed(3)
    drawn, file = Draws(), Path("noise.ckpt")
    for epochs in (1, 2) if stops else (2,):
        policy, before = make_policy(model={"dropout": "keep"}), file if epochs == 2 and stops else None
        trainer |= {"strategy": type(strategy)(timeout=60), "max_epochs": epochs, "plugins": [AtomicCheckpointIO()]}
        fit(policy, [batch_of(item) for item in ragged()], drawn, ckpt_path=before, **trainer).save_checkpoint(file)
        torch.manual_seed(4)  # what the first has left is in its checkpoint
    return {"drawn": drawn.numbers}


def move_adapters(policy: PolicyModule) -> None:
    """Begin with adapters that are not zero, the same in every process."""
    torch.manual_seed(0)
    policy.configure_model()
    for name, parameter in policy.policy.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)


def of_shape(
    kind: type[PretrainedConfig], sizes: dict[str, Any], items: list[list[Experience]], **settings: Any
) -> Callable[..., dict[str, Any]]:
    """A fit to these items of a model of that kind of configuration, whose weights are random."""

    def case(**trainer: Any) -> dict[str, Any]:
        with saved(kind, sizes) as folder:
            return trained(items, name=folder, **settings)(**trainer)

    return case


@contextmanager
def saved(kind: type[PretrainedConfig], sizes: dict[str, Any]) -> Iterator[str]:
    """A folder with a model of that kind of configuration, whose weights are random and always the same."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(kind(**sizes)).save_pretrained(folder)
        yield folder


LOSSES = {"max_grad_norm": 0.05, "loss_agg_mode": "seq-mean-token-mean", "entropy_coef": 0.01}
CRITIC, VALUE_MODEL = NOT_IN_SHARDS = ("a critic", "a value model")
STEPS = {"kl": KLConfig(coef=0.1), "optimizer_steps": 3}
ZERO = {"freeze": ["k_proj.bias"]}  # their gradients are zero but for rounding
FROZEN = {"freeze": ["vision", "layers.0"]}
ADAPTIVE = {"model": "tiny", "lr": 1e-2, "warmup_steps": 2, "kl_coef": 0.1, "kl_target": 3.0}
CASES: dict[str, Callable[..., dict[str, Any]]] = {
    "padded": trained(ragged(), layout="padded"),
    "shared prefixes": trained([groups(count=8, seed=seed) for seed in range(3)], layout="shared_prefix"),
    "one large group": trained([groups(count=4)], layout="shared_prefix", max_tokens_per_micro_batch=4096),
    "few rows": trained(sparse()),
    "reference and several steps": trained(ragged(), True, **STEPS),
    "clipped, by sequences": trained(ragged(), **LOSSES),
    "gspo": trained(ragged(), policy_loss="gspo"),
    "sft": trained(ragged(), policy_loss="sft"),
    "experts": trained(with_experts(), policy_loss={"name": "mix", "args": {"mu": 0.25}}),
    "streams": trained(in_streams(), **STREAMS),
    "a bad step": trained(broken()),
    "recomputed activations": trained(ragged(), model={"gradient_checkpointing": True}),
    "no gradient on the way": trained(rarely(items=1), change=add_rare_vectors),
    "a checkpoint on the way": trained(ragged(), callbacks=[Saves]),
    CRITIC: trained(rewarded(), True, critic={"lr": 1e-2, "kl_coef": 0.1}, optimizer_steps=3),
    VALUE_MODEL: trained(rewarded(), True, critic=ADAPTIVE),
    "adapters": trained(ragged(), True, change=move_adapters, model={"lora": LoRAConfig(r=2)}, kl=KLConfig(coef=0.1)),
    "pictures": trained(
        with_pictures(), name="tiny_vision", model={"freeze": ["k_proj.bias"]}
    ),  # zero but for rounding
    "frozen tower": trained(with_pictures(), True, name="tiny_vision", model=FROZEN, **STEPS),
    "bfloat16": trained(rarely(), change=add_rare_vectors, dtype="bf16", max_tokens_per_micro_batch=24),
}

# SmolLM2 is three times as wide. Rows of the vocabulary and experts cannot be divided evenly.
SIZES = {"vocab_size": 499, "tie_word_embeddings": True, "num_hidden_layers": 3}
SMOLLM2 = SIZES | {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 3, "num_key_value_heads": 1}
EXPERTS = SIZES | {"hidden_size": 24, "head_dim": 8, "num_attention_heads": 3, "num_key_value_heads": 1}
EXPERTS |= {"num_experts": 5, "moe_intermediate_size": 20, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
SMOLLM2_LEARNS = {"policy_loss": {"name": "mix", "args": {"mu": 0.25}}, "kl": KLConfig(coef=0.1), "optimizer_steps": 3}
SHAPES = {
    "SmolLM2": of_shape(LlamaConfig, SMOLLM2, [*with_experts(), *sparse()], prepare=True, **SMOLLM2_LEARNS),
    "mixture of experts": of_shape(Qwen3MoeConfig, EXPERTS, ragged()),
}
ASKED = (*KINDS, "mixture of experts")
MORE = {3: ("SmolLM2",), 4: ("mixture of experts", "few rows")}  # processes, and what they do


LACKED = "model.layers.1.mlp.up_proj.weight"
PLACES = ("between items", "within one", "in its backward pass")
FULL = ((0, 1), (0, 2), (1, 1), (1, 2))  # which rank's disk is full, and for how many checkpoints


class Fails(L.Callback):
    """Fails on one rank when the second item begins, or in its first pass: in the last layer, or on the way back."""

    def __init__(self, rank: int, place: str) -> None:
        self.rank = rank
        self.place = place

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == 1:
            if self.place == "between items":
                self._fail()
            first, *_, last = layers_of(pl_module.policy)
            if self.place == "within one":
                last.register_forward_pre_hook(self._fail)
            else:  # when the last layer's gradients have been sent
                first.register_full_backward_pre_hook(self._fail)

    def _fail(self, *arguments: Any) -> Any:
        raise TrinityError(f"broken on purpose on {self.rank}")


class Fills(L.Callback):
    """Saves a checkpoint after each item; from the second on, that rank finds the disk full so many times."""

    def __init__(self, folder: Path, rank: int, times: int) -> None:
        self.target = folder / "last.ckpt"
        self.rank = rank
        self.times = times

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2 and trainer.global_rank == self.rank:
            checkpoints._Writer.write_data = self._write_data  # type: ignore[method-assign]
        trainer.save_checkpoint(self.target)

    def _write_data(self, plan: Any, planner: Any) -> Any:
        self.times -= 1
        if self.times == 0:
            del checkpoints._Writer.write_data  # torch's own again
        raise OSError("disk full")


class Lacks(L.Callback):
    """Saves a checkpoint after the first item, for which that rank has no room at first."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.target = folder / "last.ckpt"
        self.rank = rank

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == self.rank:
            self.placement = pl_module.placement
            self.placement._share = self._no_share
        trainer.save_checkpoint(self.target)

    def _no_share(self, name: str, moment: str | None = None) -> Any:
        if name != LACKED:
            return type(self.placement)._share(self.placement, name, moment)
        del self.placement._share
        raise MemoryError("no room")


def failed(folder: Path, fails: L.Callback, **trainer: Any) -> dict[str, Any]:
    """The error of this process if a rank fails in this way, and its part of the policy then; rank 0 saves."""
    saves = [] if os.environ["RANK"] != "0" else [StopCheckpoint(folder)]
    policy = make_policy(optimizer=SMOOTH)
    try:
        fit(policy, [batch_of(item) for item in ragged()], fails, *saves, **trainer)
    except (TrinityError, OSError) as error:
        return {"error": f"{type(error).__name__}: {error}", "held": held(policy.policy)}
    return {"error": None}


def gathers(checkpointing: bool, **trainer: Any) -> dict[str, int]:
    """The number of times that weights are gathered for one pass, of a layer and outside the layers; and the layers."""
    count, gather = 0, fsdp.Gather.__call__

    def counted(*arguments: Any, **settings: Any) -> None:
        nonlocal count
        count += 1
        gather(*arguments, **settings)

    policy = make_policy(model={"gradient_checkpointing": checkpointing})
    fsdp.Gather.__call__ = counted  # type: ignore[method-assign]
    try:
        fit(policy, [batch_of(make_experiences(RANKS))], **trainer)
    finally:
        fsdp.Gather.__call__ = gather  # type: ignore[method-assign]
    return {"gathers": count, "layers": len(layers_of(policy.policy))}


# -- what rank 0 asks for alone ----------------------------------------------------------------------------------------


class Asks(L.Callback):
    """Does on rank 0 what the explorer's callback does with the policy: others wait.

    Without a drill of adapters, whose noise is another in shards.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        drills, model = pl_module.adapter is None, pl_module.policy
        self.answers |= faulty(pl_module) if drills else {}
        if trainer.is_global_zero:
            with perturbed(model) if drills else nullcontext(lambda scale: None) as perturb:
                perturb(0.1)
                self.answers["logprobs"] = pl_module.sequence_logprobs(range(4, 20))
                self.answers["perturbed"] = {name: tensor.clone() for name, tensor in weight_stream(model)}
            self.answers["sent"] = {name: tensor.clone() for name, tensor in weight_stream(model)}
            self.answers["shapes"] = weight_stream(model).shapes
            with tempfile.TemporaryDirectory() as folder:
                pl_module.save_pretrained(folder)
                self.answers["saved"] = load_file(Path(folder) / "model.safetensors")
                self.answers["config"] = json.loads((Path(folder) / "config.json").read_text())
        trainer.strategy.barrier()


def faulty(module: Any) -> dict[str, Any]:
    """The results for a gradient whose last row, held by the last rank, is infinite: norm, faulty weights, clipping."""
    placement, named = module.placement, dict(module.policy.named_parameters())
    names = list(named)
    for name, parameter in named.items():
        gradient = torch.ones(parameter.shape)
        gradient[-1] = torch.inf if name == names[1] else 1
        if local(parameter) is not parameter:
            gradient = placement._as_share(placement._rows_here(gradient).clone(), parameter)
        parameter.grad = gradient
    norm = placement.clip(named.values(), 1.0)
    results = {"norm": norm, "faulty": placement.faulty_gradients(module.policy)}
    results["clipped"] = not bool((local(named[names[0]].grad) == 1).all())
    module.policy.zero_grad()
    return results


def asked(kind: str, **trainer: Any) -> dict[str, Any]:
    """The answers that rank 0 receives."""
    asks, is_tiny = Asks(), kind in KINDS
    with nullcontext("tiny") if is_tiny else saved(Qwen3MoeConfig, EXPERTS) as name:
        policy = make_policy(name=name, **(KINDS[kind] if is_tiny else {}))
        if kind == "adapters":
            move_adapters(policy)
        fit(policy, [batch_of(make_experiences())], asks, **trainer)
    return asks.answers


# -- checkpoints -------------------------------------------------------------------------------------------------------


# To train on several; "folder": in shards that checkpoints are written in, too.
WAYS = {**STRATEGIES, "folder": partial(ShardStrategy, save_distributed_checkpoint=True)}
# Which way writes a checkpoint, and which reads it: what one process writes of it again has the same bits, so that the
# other pairs would show nothing more, but for shares that are read from a folder.
PAIRS = [("one", way) for way in WAYS] + [(way, "one") for way in WAYS] + [("folder", way) for way in STRATEGIES]


def settings(way: str) -> dict[str, Any]:
    """The Trainer's."""
    return {} if way == "one" else {"devices": int(os.environ["WORLD_SIZE"]), "strategy": WAYS[way](timeout=60)}


def write(file: Path, way: str, kind: str = "fp32", before: Path | None = None, epochs: int = 1) -> None:
    """Train so many epochs of the same items, those of a checkpoint included, and write another checkpoint."""
    batches = [batch_of(item) for item in ragged()]
    policy = make_policy(optimizer=SMOOTH, **KINDS[kind])
    plugins = [AtomicCheckpointIO()]
    fit(policy, batches, ckpt_path=before, max_epochs=epochs, plugins=plugins, **settings(way)).save_checkpoint(file)


def write_first(folder: Path, way: str) -> None:
    """Write checkpoints of a way to train that resumes none."""
    for kind in KINDS:
        write(folder / f"{way}-{kind}.ckpt", way, kind)


def write_again(folder: Path, way: str) -> None:
    """Write what a way to train has after it resumed other ways' checkpoints, at once and after further training."""
    for before in (writer for writer, reader in PAIRS if reader == way):
        for kind in KINDS:
            write(folder / f"{before}-{kind}-{way}.ckpt", way, kind, before=folder / f"{before}-{kind}.ckpt")
        write(folder / f"{before}-later-{way}.ckpt", way, before=folder / f"{before}-fp32.ckpt", epochs=2)


def start(
    folder: Path, run_train: Commands, ranks: int = RANKS, program: str = "support.replicas"
) -> list[dict[str, dict[str, dict[str, Any]]]]:
    """The results of all cases by strategy and by rank, each rank in a process of its own."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=1))
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
    shared |= {"TORCHELASTIC_RUN_ID": "tests", "TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": str(ranks)}
    processes, files = [], [folder / f"{rank}.pt" for rank in range(ranks)]
    for rank, file in enumerate(files):
        (folder / str(rank)).mkdir()
        variables = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(run_train.start(folder / str(rank), str(file), program=program, **variables))
    try:
        for rank, process in enumerate(processes):
            assert process.wait() == 0, (folder / str(rank) / "stdout").read_text()[-4000:]
    finally:
        for process in processes:
            process.kill()
    return [torch.load(file, weights_only=True) for file in files]


def _main(file: str) -> None:
    os.chdir(Path(file).parent)  # the folder of the run, for all ranks
    if (more := MORE.get(int(os.environ["WORLD_SIZE"]))) is not None:
        cases = {name: (SHAPES | CASES)[name] for name in more}
        torch.save({way: {name: case(**settings(way)) for name, case in cases.items()} for way in STRATEGIES}, file)
        return
    folder, results = Path(file).parent, {}
    cases = CASES | {"SmolLM2": SHAPES["SmolLM2"]} | {f"asked {kind}": partial(asked, kind) for kind in ASKED}
    cases |= {"noise": partial(noise, stops=False), "noise resumed": partial(noise, stops=True)}
    cases |= {"gathers": partial(gathers, False), "gathers, recomputed": partial(gathers, True)}
    for way in STRATEGIES:
        here = {name: case for name, case in cases.items() if way != "fsdp2" or name not in NOT_IN_SHARDS}
        results[way] = {name: case(**settings(way)) for name, case in here.items()}
        for rank, place in product(range(RANKS), PLACES):
            error = failed(folder / f"{way}-{rank}-{place}", Fails(rank, place), **settings(way))
            results[way][f"rank {rank} fails {place}"] = error
    for rank in range(RANKS):
        folder_of = folder / f"lacks-{rank}"
        results["fsdp2"][f"rank {rank} lacks room"] = failed(folder_of, Lacks(folder_of, rank), **settings("fsdp2"))
    results["folder"] = {"rank 1 fails": failed(folder / "folder-fails", Fails(1, PLACES[0]), **settings("folder"))}
    for rank, times in FULL:
        name = f"full-{rank}-{times}"
        results["folder"][name] = failed(folder / name, Fills(folder / name, rank, times), **settings("folder"))
    for work in (write_first, write_again):
        for way in WAYS:
            work(folder, way)
    torch.save(results, file)


if __name__ == "__main__":
    _main(sys.argv[1])
