"""Refusals of settings that engines, runners or auxiliary models cannot have: before anything starts, with a fix."""

import importlib.metadata
import importlib.util
import os
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig
from support.compose import composed
from support.errors import refuses

from trinity_lightning.config.engines import SENT, capabilities_of
from trinity_lightning.config.run import typed_config, validate
from trinity_lightning.config.servers import sync_method
from trinity_lightning.errors import ConfigError
from trinity_lightning.evaluate import _without_training

CORES = len(os.sched_getaffinity(0))
SERVER = ("engine=vllm_server",)
AHEAD = (*SERVER, "explorer.sync_offset=1")
ELSEWHERE = (*SERVER, "explorer.runner=ray", "explorer.ray_address=node7:6379")
URLS = "engine.urls=[http://node7:8000]"
JUDGE = "+auxiliary_models.judge.model=tiny"
ENDPOINT = (JUDGE, "+auxiliary_models.judge.url=https://api.example.com/v1")
MIX = ("+recipe=mix",)


def configured(*arguments: str) -> DictConfig:
    """The configuration of a run with these arguments."""
    recipe = () if any(argument.startswith("+recipe") for argument in arguments) else ("+recipe=grpo",)
    return composed(*recipe, "model=tiny", *arguments)


REFUSED = {
    # Ray
    "a socket for workers elsewhere": (ELSEWHERE, "engine.urls"),
    "a judge's socket for workers elsewhere": (
        (*ELSEWHERE, URLS, JUDGE),
        "auxiliary_models.judge.url",
    ),
    "a cluster that is not used": (("explorer.ray_address=auto",), "explorer.ray_address"),
    "more workers than the machine can start": (
        (*SERVER, "explorer.runner=ray", f"explorer.runner_per_model={8 * CORES + 1}"),
        "explorer.runner",
    ),
    # numbers
    "refills without end": (("explorer.max_refills=-1",), "explorer.max_refills"),
    "negative retries": (("explorer.max_retry_times=-1",), "explorer.max_retry_times"),
    "a negative lag": (("explorer.sync_offset=-1",), "explorer.sync_offset"),
    "chunks of nothing": (
        ("explorer.max_repeat_times_per_runner=0",),
        "explorer.max_repeat_times_per_runner",
    ),
    "a time-out of workers that there are not": (
        ("explorer.reward_timeout=5",),
        "explorer.reward_timeout",
    ),
    "a sync without time": (
        ("synchronizer.sync_timeout=0",),
        "synchronizer.sync_timeout",
    ),
    "a sync without end": (("synchronizer.sync_timeout=inf",), "synchronizer.sync_timeout"),
    # weights without a file
    "a folder of what needs none": (
        (*SERVER, "synchronizer=nccl", "synchronizer.folder=w"),
        "synchronizer.folder",
    ),
    "a second weight transfer": (
        (*SERVER, "synchronizer=nccl", "+engine.args.weight_transfer_config={backend: ipc}"),
        "synchronizer",
    ),
    "a second weight transfer on one GPU": (
        (*SERVER, "synchronizer=ipc", "+engine.args.worker_extension_cls=my.Extension"),
        "synchronizer",
    ),
    "memory of this process": (
        ("synchronizer=ipc",),
        "synchronizer.method",
    ),
    "a group with an engine of this process": (
        ("synchronizer=nccl",),
        "synchronizer.method",
    ),
    "servers by memory": (
        (*SERVER, "synchronizer=memory"),
        "synchronizer.method",
    ),
    "rollouts ahead, uncorrected": (
        (*AHEAD, "algorithm.rollout_correction.level=none"),
        "algorithm.policy_loss",
    ),
    "old weights, uncorrected": (
        ("explorer.sync_interval=2", "algorithm.rollout_correction.level=none", "algorithm=reinforce"),
        "algorithm.policy_loss",
    ),
    "stored experiences, uncorrected": (
        ("+recipe=offline", "buffer.path=.", "algorithm.rollout_correction.level=none"),
        "algorithm.policy_loss",
    ),
    "corrected twice": (
        ("algorithm.old_logprobs=engine",),
        "algorithm.old_logprobs",
    ),
    "an unknown way": (
        (*SERVER, "synchronizer.method=ncll"),
        "synchronizer.method",
    ),
    # servers
    "no cores": ((*SERVER, "engine.cpu_cores=0"), "engine.cpu_cores"),
    "more cores than there are": (
        (*SERVER, f"engine.cpu_cores={CORES + 1}"),
        "engine.cpu_cores",
    ),
    "more cores than there are for all servers": (
        (*SERVER, "engine.servers=3", f"engine.cpu_cores={CORES}"),
        "engine.cpu_cores",
    ),
    "no core for the trainer": ((*AHEAD, f"engine.cpu_cores={CORES}"), "engine.cpu_cores"),
    "no core for the trainer beside groups under way": (
        (*SERVER, "explorer.max_staleness=1", f"engine.cpu_cores={CORES}"),
        "engine.cpu_cores",
    ),
    # rollouts that do not wait
    "weights that change under a rollout of the training model": (
        ("engine=transformers", "explorer.max_staleness=1"),
        "explorer.in_flight",
    ),
    "a critic of other weights than the rollouts": (
        ("+recipe=ppo", "explorer.max_staleness=1"),
        "algorithm.critic",
    ),
    "older weights, neither clipped nor corrected": (
        (
            "explorer.max_staleness=1",
            "algorithm.policy_loss.name=reinforce",
            "algorithm.rollout_correction.level=none",
            "algorithm.old_logprobs=engine",
        ),
        "algorithm.policy_loss",
    ),
    "a ratio to the trainer's own weights alone": (
        ("explorer.max_staleness=1", "algorithm.rollout_correction.level=none"),
        "algorithm.policy_loss",
    ),
    "tasks by results that are not known yet": (
        ("explorer.max_staleness=1", "taskset.order=by_difficulty"),
        "taskset.order",
    ),
    "groups under way in engines of all ranks": (
        ("explorer.max_staleness=1", "engine.per_rank=true", "trainer=ddp"),
        "engine.per_rank",
    ),
    "fewer steps to the training than to the beginning": (
        ("explorer.max_staleness=1", "explorer.run_ahead=2"),
        "explorer.run_ahead",
    ),
    "adapters that requests keep": (
        (*SERVER, "explorer.max_staleness=1", "model.lora.r=4", "synchronizer.lora=adapter"),
        "synchronizer.lora",
    ),
    "servers there and to be started": ((*SERVER, URLS, "engine.servers=2"), "engine.urls"),
    "GPUs of servers elsewhere": ((*SERVER, URLS, "engine.gpus=[0]"), "engine.urls"),
    "a host without a scheme": ((*SERVER, "engine.urls=[node7:8000]"), "engine.urls"),
    "the same GPU twice": ((*SERVER, "engine.gpus=[1,1]"), "engine.gpus"),
    "a negative GPU": ((*SERVER, "engine.gpus=[-1]"), "engine.gpus"),
    "URLs of an engine of this process": (
        (URLS,),
        "engine.urls",
    ),
    "servers of an engine of this process": (("engine.servers=2",), "engine.servers"),
    "GPUs of an engine of this process": (("engine.gpus=[0]",), "engine.gpus"),
    "cores of an engine of this process": (("engine.cpu_cores=1",), "engine.cpu_cores"),
    "a cache of another engine": (
        ("engine=transformers", "engine.kv_cache_gb=3"),
        "engine.kv_cache_gb",
    ),
    "vLLM's arguments for another engine": (
        ("engine=transformers", "+engine.args.enforce_eager=true"),
        "engine.args",
    ),
    "a dtype of the training model's own": (
        ("engine=transformers", "engine.dtype=fp32"),
        "engine.dtype",
    ),
    "older weights than the training model's own": (
        ("engine=transformers", "explorer.sync_interval=2"),
        "explorer.sync_interval",
    ),
    "a cache of servers elsewhere": ((*SERVER, URLS, "engine.kv_cache_gb=3"), "engine.urls"),
    "arguments of servers elsewhere": ((*SERVER, URLS, "+engine.args.seed=1"), "engine.urls"),
    "several devices within a process": (
        ("+engine.args.tensor_parallel_size=2",),
        "engine.args.tensor_parallel_size",
    ),
    "speculative decoding on a CPU": (
        ("+engine.args.speculative_config={method: ngram, num_speculative_tokens: 3}",),
        "engine.args.speculative_config",
    ),
    "n-grams on a CPU": (("engine.speculative=4",), "engine.speculative"),
    "n-grams of a judge on a CPU": (
        (JUDGE, "+auxiliary_models.judge.engine.speculative=4"),
        "auxiliary_models.judge.engine.speculative",
    ),
    "n-grams twice": (
        ("engine.speculative=4", "+engine.args.speculative_config={method: ngram, num_speculative_tokens: 3}"),
        "engine.speculative",
    ),
    "n-grams of servers elsewhere": ((*SERVER, URLS, "engine.speculative=4"), "engine.speculative"),
    "no n-grams": (("engine.speculative=0",), "engine.speculative"),
    "n-grams without an engine": (
        ("engine=transformers", "engine.speculative=4"),
        "engine.speculative",
    ),
    "sleep of another engine": ((*SERVER, "engine.sleep=never"), "engine.sleep"),
    "sleep without a GPU": (("engine.sleep=always",), "engine.sleep"),
    "a folder that nobody reads": (("synchronizer.folder=w",), "synchronizer.folder"),
    # auxiliary models
    "a key without an endpoint": (
        (JUDGE, "+auxiliary_models.judge.api_key_env=HOME"),
        "auxiliary_models.judge.api_key_env",
    ),
    "an engine of an endpoint": (
        (*ENDPOINT, "+auxiliary_models.judge.engine.max_model_len=64"),
        "auxiliary_models.judge.engine",
    ),
    "a judge without a context": (
        (JUDGE, "+auxiliary_models.judge.engine.max_model_len=0"),
        "auxiliary_models.judge.engine.max_model_len",
    ),
    "a judge that decodes nothing": (
        (JUDGE, "+auxiliary_models.judge.engine.max_num_seqs=0"),
        "auxiliary_models.judge.engine.max_num_seqs",
    ),
    "a judge's URL in the wrong place": (
        (JUDGE, "+auxiliary_models.judge.engine.urls=[http://node7:8000]"),
        "auxiliary_models.judge.engine.urls",
    ),
    "two servers of a judge": (
        (JUDGE, "+auxiliary_models.judge.engine.servers=2"),
        "auxiliary_models.judge.engine.servers",
    ),
    "another engine of a judge": (
        (JUDGE, "+auxiliary_models.judge.engine.name=transformers"),
        "auxiliary_models.judge.engine.name",
    ),
    "a judge that sleeps": (
        (JUDGE, "+auxiliary_models.judge.engine.sleep=always"),
        "auxiliary_models.judge.engine.sleep",
    ),
    "an evaluation by a judge that is not there": (
        ("eval_workflow=judge",),
        "eval_workflow.args.judge",
    ),
    "a judge without cores": (
        (JUDGE, "+auxiliary_models.judge.engine.cpu_cores=0"),
        "auxiliary_models.judge.engine.cpu_cores",
    ),
    "a judge that takes all cores": (
        (*AHEAD, JUDGE, f"+auxiliary_models.judge.engine.cpu_cores={CORES}"),
        "auxiliary_models.judge.engine.cpu_cores",
    ),
    "a judge by a name that is not there": (
        ("workflow=judge", JUDGE, "+workflow.args.judge=jugde"),
        "workflow.args.judge",
    ),
    "a misspelt key of a judge": (
        (JUDGE, "+auxiliary_models.judge.urll=x"),
        "auxiliary_models.judge.urll",
    ),
    "a misspelt model of a judge": (
        ("+auxiliary_models.judge.modle=tiny",),
        "auxiliary_models.judge.modle",
    ),
    "a judge without a model": (("+auxiliary_models.judge.url=http://x",), "auxiliary_models.judge"),
    "a misspelt knob of a judge's engine": (
        (JUDGE, "+auxiliary_models.judge.engine.max_model_length=64"),
        "auxiliary_models.judge.engine.max_model_length",
    ),
    "an endpoint without a scheme": (
        (JUDGE, "+auxiliary_models.judge.url=node7:8000/v1"),
        "auxiliary_models.judge.url",
    ),
    "a key that is not there": (
        (*ENDPOINT, "+auxiliary_models.judge.api_key_env=NO_SUCH_KEY"),
        "auxiliary_models.judge.api_key_env",
    ),
}


def test_a_gpu_that_this_process_may_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    validate(configured(*SERVER, "engine.gpus=[1]"))
    with refuses("engine.gpus"):
        validate(configured(*SERVER, "engine.gpus=[2]"))


def test_gpus_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with refuses("engine.gpus"):
        validate(configured(*SERVER, "engine.gpus=[0]"))


FOUR = (*SERVER, "engine.servers=2", "engine.gpus=[0,1,2,3]")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*SERVER, "engine.servers=2", "engine.gpus=[0,1,2]"), r"engine.gpus \(3 of"),
        (
            (*FOUR, "+engine.args.tensor_parallel_size=4"),
            r"\(tensor_parallel_size=4\) spread a server over 4 GPUs, and engine.gpus gives each 2",
        ),
        ((*FOUR, "+engine.args.data_parallel_size=2", "+engine.args.tensor_parallel_size=2"), "over 4 GPUs"),
    ],
)
def test_gpus_are_shared_out_and_all_of_them_used(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    validate(configured(*FOUR))
    validate(configured(*FOUR, "+engine.args.data_parallel_size=2"))
    validate(configured(*SERVER, "engine.servers=2", "engine.gpus=[3,1]"))
    with pytest.raises(ConfigError, match=message):
        validate(configured(*arguments))


@pytest.mark.parametrize(
    ("gpus", "trainer", "fix"),
    [
        ("[2,3]", ("trainer.devices=2",), None),
        ("[0]", ("trainer.devices=2",), None),  # that of rank 0, which trains and generates by a plan
        ("[2,3]", ("trainer.devices=auto", "trainer.accelerator=cpu"), None),
        ("[1,2]", ("trainer.devices=2",), r"trainer.devices=2 engine.gpus=\[2, 3\]"),
        ("[3]", (), r"trainer.devices=3 engine.gpus=\[3\]"),  # all that there are, without a number
    ],
)
def test_servers_and_ranks_have_gpus_of_their_own(
    gpus: str, trainer: tuple[str, ...], fix: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    config = configured(*SERVER, f"engine.gpus={gpus}", "trainer=ddp", *trainer)
    with pytest.raises(ConfigError, match=f"trains on the first .*such as {fix}") if fix else nullcontext():
        validate(config)


def test_training_on_a_gpu_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with refuses("trainer.accelerator"):
        validate(configured("trainer=gpu"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    validate(configured("trainer=gpu"))


def test_n_grams_on_a_gpu_are_not_refused_but_with_min_p(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    validate(configured("engine.speculative=4"))
    with refuses("eval_sampling.min_p"):
        validate(configured("engine.speculative=4", "eval_sampling.min_p=0.1"))


def test_a_quantised_checkpoint_is_not_trained(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}')
    with refuses("model.name"):
        validate(configured("model=custom", f"model.name={tmp_path}"))


NCCL = (*SERVER, "synchronizer=nccl")


@pytest.mark.slow
@pytest.mark.parametrize("gpus", ["null", "[0,1]"])
def test_nccl_wants_gpus_apart_from_the_trainers(gpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    validate(configured(*NCCL, "engine.gpus=[2]"))
    validate(configured(*NCCL, "engine.servers=2", "engine.gpus=[3,1]"))
    validate(configured(*NCCL, URLS))
    with refuses("engine.gpus"):
        validate(configured(*NCCL, f"engine.gpus={gpus}"))


@pytest.mark.parametrize(
    ("there", "arguments", "message"),
    [
        (0, (), "sees none: take synchronizer=checkpoint"),
        (1, ("engine.gpus=[0]",), "this process sees one: take synchronizer=checkpoint"),
        (2, ("engine.gpus=[1]", "trainer.accelerator=cpu"), "trainer.accelerator is cpu: take synchronizer=checkpoint"),
    ],
)
def test_nccl_wants_gpus(there: int, arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    with pytest.raises(ConfigError, match=message):
        validate(configured(*NCCL, *arguments))


@pytest.mark.parametrize(
    ("there", "arguments", "message"),
    [
        (0, (), "sends weights within a GPU, and this process sees none: take synchronizer=checkpoint"),
        (1, ("trainer.accelerator=cpu",), "trainer.accelerator is cpu: take synchronizer=checkpoint"),
        (2, (URLS,), "engine.urls names servers that run already: take synchronizer=nccl or checkpoint"),
        (2, ("engine.gpus=[1]",), r"engine.gpus is \[1\], .* the trainer's GPU \(0\): leave engine.gpus out"),
        (1, (), None),
        (2, ("engine.gpus=[0]", "trainer=fsdp2", "trainer.devices=2"), None),
    ],
)
def test_ipc_wants_the_trainers_gpu(
    there: int, arguments: tuple[str, ...], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        validate(configured(*SERVER, "synchronizer=ipc", *arguments))


@pytest.mark.parametrize(
    ("arguments", "gpus", "method", "why"),
    [
        ((), 1, "ipc", ""),
        (("engine.gpus=[0]", "engine.servers=2"), 1, "ipc", ""),
        (("engine.gpus=[1]",), 2, "nccl", ""),
        (("trainer=ddp", "trainer.devices=2", "engine.gpus=[2,3]"), 4, "nccl", ""),
        ((), 0, "checkpoint", "the trainer has no GPU"),
        (("trainer=cpu",), 1, "checkpoint", "the trainer has no GPU"),
        (("engine.urls=[http://node7:8000]",), 1, "checkpoint", "the servers of engine.urls run already"),
        (("synchronizer.folder=/shared",), 1, "checkpoint", "synchronizer.folder is set"),
        (("model.lora.r=4", "synchronizer.lora=adapter"), 1, "checkpoint", "servers read adapters from a folder"),
        (("trainer=ddp", "trainer.devices=1", "+trainer.num_nodes=2"), 1, "checkpoint", "trainer.num_nodes is 2"),
        (
            ("+engine.args.worker_extension_cls=a.B",),
            1,
            "checkpoint",
            "engine.args sets worker_extension_cls",
        ),
        (("synchronizer=checkpoint",), 1, "checkpoint", ""),
        (("engine=vllm",), 1, "memory", ""),
    ],
)
def test_auto_sends_weights_to_servers_by_the_fastest_way(
    arguments: tuple[str, ...], gpus: int, method: str, why: str
) -> None:
    run = typed_config(configured(*SERVER, *arguments))
    trainer = configured(*SERVER, *arguments).trainer
    assert sync_method(run, capabilities_of(run.engine.name), trainer, gpus) == (method, why)


@pytest.mark.parametrize(
    ("version", "settings", "why"),
    [
        ("0.31.9+cu130", "", "vLLM is older than 0.32"),
        ("0.32.0rc1+cu130", "", ""),
        ("1.0", "", ""),
        ("0.32.0", "backend:native,expandable_segments:True", "memory in expandable segments .* is not shared"),
    ],
)
def test_auto_takes_a_folder_where_memory_is_not_shared(
    version: str, settings: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    config = configured(*SERVER)
    method, reason = sync_method(typed_config(config), capabilities_of("vllm_server"), config.trainer, 1)
    assert method == ("checkpoint" if why else "ipc")
    assert re.fullmatch(why, reason)


@pytest.mark.parametrize("method", SENT)
def test_an_evaluation_sends_weights_as_a_folder(method: str) -> None:
    config = configured(*SERVER, f"synchronizer={method}")
    _without_training(config)
    assert config.synchronizer.method == "auto"
    validate(config, trains=False)
    with pytest.raises(ConfigError, match=r"engine.urls their weights as a folder: set synchronizer=checkpoint"):
        _without_training(configured(*NCCL, URLS))


OF_TRAINING = {
    "rollouts ahead": ("+recipe=one_step_off_policy", "engine=vllm"),
    "rollouts ahead by the training model": ("+recipe=one_step_off_policy", "engine=transformers"),
    "older weights": ("explorer.sync_interval=2", "engine=transformers"),
    "no core for the trainer": (*AHEAD, f"engine.cpu_cores={CORES}"),
    "shares of the policy": ("trainer=fsdp2", "engine=transformers"),
    "several machines": ("trainer=ddp", "trainer.devices=2", "+trainer.num_nodes=2", "engine.per_rank=true"),
    "a section left out": ("~explorer",),
    "no room for training rollouts": ("engine.max_model_len=64", "eval_sampling.max_tokens=8"),
}


@pytest.mark.parametrize("case", OF_TRAINING)
def test_an_evaluation_is_not_refused_by_rules_of_training(case: str) -> None:
    """It is one process, in which nothing trains, whatever the recipe says."""
    config = configured(*OF_TRAINING[case])
    _without_training(config)
    run = validate(config, trains=False)
    assert not run.explorer.samples_older_weights


def test_an_evaluation_has_its_gpus_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    config = configured(*SERVER, "engine.gpus=[1,2]", "trainer=ddp", "trainer.devices=4")
    _without_training(config)
    validate(config, trains=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((URLS,), "engine.urls "),
        (("engine.servers=2",), "engine.servers "),
        (("engine=vllm_server", f"engine.cpu_cores={CORES + 1}"), "engine.cpu_cores is"),
        (("eval_sampling.max_tokens=1024",), "eval_sampling.max_tokens .* leaves no room"),
        (("eval_workflow=judge",), "eval_workflow=judge asks auxiliary model 0, and there are 0"),
    ],
)
def test_an_evaluation_of_a_recipe_without_rollouts_generates(arguments: tuple[str, ...], message: str) -> None:
    sft = ("+recipe=sft", "buffer.path=org/data")
    validate(configured(*sft), trains=False)
    with pytest.raises(ConfigError, match=message):
        validate(configured(*sft, *arguments), trains=False)


ON_ANY_MACHINE = {
    "rollouts ahead": ("explorer.sync_offset=1",),
    "older weights": ("engine=transformers", "explorer.sync_interval=2"),
    "servers of an engine of this process": ("engine.servers=4",),
    "adapters that there are not": ("synchronizer.lora=adapter",),
    "weights by another way": ("synchronizer=nccl",),
    "a judge that is not there": ("workflow=judge",),
    "a judge that nothing asks": (JUDGE,),
    "servers there and to be started": (*SERVER, URLS, "engine.servers=2"),
    "a socket for workers elsewhere": ELSEWHERE,
    "workers that cannot reach the engine": ("explorer.runner=ray",),
    "a second weight transfer": (*SERVER, "synchronizer=nccl", "+engine.args.weight_transfer_config={backend: ipc}"),
    "the trainer's GPU for servers": (*SERVER, "synchronizer=nccl", "engine.gpus=[0]"),
    "GPU to GPU from a CPU": (*SERVER, "synchronizer=nccl", "engine.gpus=[1]", "trainer=cpu"),
    "another GPU than the trainer's": (*SERVER, "synchronizer=ipc", "engine.gpus=[1]"),
    "GPUs that train": (*SERVER, "trainer=ddp", "trainer.devices=4", "engine.gpus=[2,3]"),
    "GPUs that cannot be shared out": (*SERVER, "engine.servers=2", "engine.gpus=[1,2,3]"),
    "a number of GPUs that is none": (*SERVER, "engine.gpus=[1]", "+engine.args.tensor_parallel_size=two"),
    "several devices within a process": ("+engine.args.tensor_parallel_size=2",),
    "n-grams twice": ("engine.speculative=4", "+engine.args.speculative_config={method: ngram}"),
    "n-grams with min_p": ("engine.speculative=4", "eval_sampling.min_p=0.1"),
}


@pytest.mark.parametrize("case", ON_ANY_MACHINE)
def test_a_plan_refuses_what_its_run_would_on_any_machine(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(*ON_ANY_MACHINE[case])
    with pytest.raises(ConfigError) as of_the_plan:
        validate(config, here=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ConfigError) as of_the_run:
        validate(config)
    assert str(of_the_plan.value)[:60] == str(of_the_run.value)[:60]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("engine.speculative=4",),
        ("engine.sleep=always",),
        ("trainer=gpu",),
        ("trainer=ddp", "trainer.devices=64", "+trainer.num_nodes=8", *SERVER, "engine.gpus=[64]"),
        ("trainer=ddp", *SERVER, "engine.gpus=[1]"),  # of how many GPUs, nobody knows here
        (*SERVER, "synchronizer=nccl", "engine.gpus=[1]"),
        (*SERVER, "synchronizer=ipc"),
        (*SERVER, f"engine.cpu_cores={CORES + 1}"),
        (*SERVER, "explorer.runner=ray", f"explorer.runner_per_model={8 * CORES + 1}"),
        ("workflow=judge", JUDGE, "+auxiliary_models.judge.engine.gpus=[7]"),
        ("workflow=judge", *ENDPOINT, "+auxiliary_models.judge.api_key_env=NO_SUCH_KEY"),
    ],
)
def test_a_plan_is_not_refused_for_what_this_machine_lacks(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    validate(configured(*arguments), here=False)


def test_nccl_wants_vllm_for_its_sending_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        validate(configured(*NCCL, URLS))


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    arguments, key = REFUSED[case]
    with refuses(key):
        validate(configured(*arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        (*ELSEWHERE, URLS),
        (*ELSEWHERE, URLS, *ENDPOINT, "workflow=judge"),
        (*MIX, "explorer.max_staleness=1", "algorithm.old_logprobs=engine", "algorithm.rollout_correction.level=none"),
        (*SERVER, "explorer.runner=ray", "explorer.ray_address=auto"),
        (*SERVER, "explorer.runner=ray", "explorer.ray_address=127.0.0.1:6379"),
        (*SERVER, "explorer.runner=ray", "explorer.runner_per_model=8", JUDGE, "workflow=judge"),
        (*SERVER, f"engine.cpu_cores={CORES}"),
        ("engine=transformers",),
        ("workflow=judge", *ENDPOINT),
        ("eval_workflow=judge", *ENDPOINT),
        ("workflow=judge", JUDGE, "+workflow.args.judge=judge"),
        AHEAD,
        (*AHEAD, "algorithm.old_logprobs=engine", "algorithm.rollout_correction.level=none"),
        ("explorer.sync_interval=2", "algorithm=opmd", "algorithm.rollout_correction.level=none"),
        ("explorer.sync_interval=2", "algorithm.policy_loss=my.topr", "algorithm.rollout_correction.level=none"),
        ("algorithm.rollout_correction.level=none",),
    ],
)
def test_what_can_work_is_not_refused(arguments: tuple[str, ...]) -> None:
    validate(configured(*arguments))


def test_an_endpoints_key_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    validate(configured(*ENDPOINT, "workflow=judge", "+auxiliary_models.judge.api_key_env=MY_KEY"))
