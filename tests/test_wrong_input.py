"""Wrong input: one readable sentence, at once; or a failure that is counted while the run goes on."""

import csv
import importlib.util
import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from unittest.mock import Mock

import pytest
from omegaconf import OmegaConf
from support.compose import composed
from support.errors import refuses
from support.runs import TWO, RunTrain, environment

from trinity_lightning.build import instantiate
from trinity_lightning.common.model_memory import CPU_TOKENS
from trinity_lightning.config import hydra as compose
from trinity_lightning.config.algorithm import KLConfig
from trinity_lightning.config.critic import CriticConfig
from trinity_lightning.config.engines import has_driver
from trinity_lightning.config.explain import CONFIG_ERRORS, explain
from trinity_lightning.config.registry import import_object
from trinity_lightning.config.run import typed_config, validate
from trinity_lightning.config.trainer import check_launched
from trinity_lightning.errors import ConfigError
from trinity_lightning.train import check, check_models, main
from trinity_lightning.trainer.objective import Objective

REFUSALS = Path(__file__).with_name("golden") / "refusals.txt"

# By the whole command, in a process of its own: what only that does, and one of each kind of error.
BY_THE_COMMAND = {
    "unknown recipe": (["+recipe=grop"], ["unknown recipe 'grop'", "Did you mean 'grpo'"]),
    "letters of a recipe exchanged": (["+recipe=gpro"], ["Did you mean 'grpo'"]),
    "misspelt nested key": (["+recipe=grpo", "explorer.batch_sise=4"], ["Did you mean 'explorer.batch_size'"]),
    "mapping that changes nothing": (
        ["+recipe=grpo", "eval_tasksets={}"],
        ["eval_tasksets={} changes nothing", "'~eval_tasksets.addition_heldout'", "'~eval_tasksets'"],
    ),
    "name that leaves the folder": (["+recipe=grpo", "name=../x"], ["name: '../x' cannot be a folder's name"]),
    "output folder of a variable that is not set": (
        ["+recipe=grpo", "output_dir="],
        ["output_dir is empty", "leave it out"],
    ),
    "output root that is a file": (["+recipe=grpo", "output_root=/dev/null"], ["output_root:"]),
    "missing data file": (
        ["+recipe=grpo", "taskset=dataset", "taskset.path=no.jsonl"],
        ["no file or folder 'no.jsonl'"],
    ),
    "impossible value": (["+recipe=grpo", "steps=0"], ["steps is 0", "1 or more"]),
    "argument of an operator without a value": (
        ["+recipe=grpo", "operators=overlong_penalty"],
        ["operators.overlong_penalty.args.cache_length", "give it a value"],
    ),
    "an entry of the recipes of a sweep": (
        ["--multirun", "+recipe=dapo,rloo", "~operators.overlong_penalty"],
        ["'operators.overlong_penalty' does not exist", "leave out all of them, '~operators'"],
    ),
    "unknown reward": (["+recipe=grpo", "reward=last_numbr"], ["last_numbr", "Did you mean 'last_number'"]),
    "nothing to resume": (["+recipe=grpo", "ckpt_path=last"], ["no checkpoint", "ckpt_path=last"]),
    "a recipe without its key": (["rloo"], ["cannot read the override 'rloo'", "Did you mean +recipe=rloo?"]),
    "misspelt program": (["plann", "+recipe=grpo"], ["cannot read the override 'plann'", "Did you mean plan?"]),
    "misspelt group of recipes": (["+recip=grpo"], ["unknown key 'recip'. Did you mean +recipe=NAME?"]),
    "unreadable override": (["+recipe=grpo", "seed=[1"], ["seed=[1"]),
    "a number for a name": (
        ["+recipe=grpo", "engine=3"],
        ["engine=3: give the group the name of a choice, engine=NAME.", "Known: transformers, vllm, vllm_server."],
    ),
    "a list of numbers for a group": (
        ["+recipe=grpo", "algorithm=[1]"],
        ["algorithm=[1]: give the group the name of a choice, algorithm=NAME."],
    ),
    "an empty list for a group": (["+recipe=grpo", "model=[]"], ["model=[] chooses nothing: give model=NAME."]),
    "null for a group": (
        ["+recipe=grpo", "callbacks=null"],
        ["callbacks=NAME, or '~callbacks' for none. Known: default"],
    ),
    "folder of a run that is a file": (["+recipe=grpo", "hydra.run.dir=taken"], ["hydra.run.dir:", "'taken'"]),
    "output folder that cannot be made": (
        ["+recipe=grpo", "output_dir=/proc/x"],
        ["output_dir", "'/proc/x'", "give another one"],
    ),
    "output folder that cannot be written": (["+recipe=grpo", "output_dir=/proc/self"], ["output_dir", "'/proc/self/"]),
    "another primary file": (["--config-name", "grpo"], ["leave out --config-name", "+recipe=NAME"]),
}

TEACHER = "auxiliary_models.teacher.model=tiny"
TAUGHT = ["+recipe=on_policy_distill_top_k", TEACHER]
BY_SAMPLED_TOKENS = ["+recipe=on_policy_distill", TEACHER]
STREAM = ["+recipe=grpo", "algorithm=streams"]
STREAMS = "+algorithm.policy_loss.args.streams"
REFUSED = {
    "two recipes": (["+recipe=grpo", "+recipe=ppo"], ["recipe is chosen twice: give +recipe=NAME once."]),
    "choice by the group's name": (
        ["+recipe=grpo", "algorithm.name=dpo"],
        ["unknown key 'algorithm.name'. Choose by algorithm=NAME or", "defaults, '- override /algorithm: NAME'."],
    ),
    "choice of a trainer by its name": (
        ["+recipe=grpo", "+trainer.name=ddp"],
        "trainer.name",
    ),
    "strategy by its name": (["+recipe=grpo", "trainer.strategy=ddp"], ["choose trainer=ddp or trainer=fsdp2."]),
    "misspelt key": (["+recipe=grpo", "sede=1"], ["unknown key 'sede'", "Did you mean 'seed'"]),
    "key added past Hydra": (["+recipe=grpo", "+explorer.batchsize=4"], "explorer.batchsize"),
    "free key without a plus": (
        ["+recipe=grpo", "workflow.args.max_turns=4"],
        ["'workflow.args.max_turns' is not set yet", "+workflow.args.max_turns=VALUE"],
    ),
    "critic and another strategy": (
        ["+recipe=ppo", "add_strategy=grpo", "explorer.repeat_times=8"],
        "algorithm.critic",
    ),
    "strategy without its critic": (["+recipe=grpo", "add_strategy=critic"], "add_strategy"),
    "critic of adapters": (["+recipe=ppo", "model.lora.r=4"], "algorithm.critic"),
    "critic in shards": (["+recipe=ppo", "trainer=fsdp2"], "algorithm.critic"),
    "critic without rollouts": (
        ["+recipe=ppo", "buffer=dataset", "buffer.path=pyproject.toml"],
        "algorithm.critic",
    ),
    "critic of supervised training": (
        ["+recipe=ppo", "algorithm.policy_loss=sft"],
        "algorithm.critic",
    ),
    "critic of steps with rewards of their own": (
        ["+recipe=ppo", "workflow=multi_turn", "workflow.args.mode=step_wise", "++workflow.args.step_reward=own"],
        "workflow.args.step_reward",
    ),
    "critic beside expert data": (
        [
            "+recipe=ppo",
            "buffer.expert.per_step=2",
            "buffer.expert.dataset.source=dataset",
            "buffer.expert.dataset.path=x/y",
        ],
        "algorithm.critic",
    ),
    "critic that is no mapping": (["+recipe=grpo", "algorithm.critic=yes"], "algorithm.critic"),
    "critic with an unknown knob": (["+recipe=ppo", "+algorithm.critic.gama=1"], "algorithm.critic.gama"),
    "critic with a wrong number": (["+recipe=ppo", "algorithm.critic.lam=2"], "algorithm.critic.lam"),
    "target of a weight that is 0": (["+recipe=ppo", "algorithm.critic.kl_target=6"], "algorithm.critic.kl_target"),
    "more optimizer steps than groups": (
        ["+recipe=grpo", "algorithm.optimizer_steps=9"],
        "algorithm.optimizer_steps",
    ),
    "greedy training": (["+recipe=grpo", "sampling.temperature=0"], "sampling.temperature"),
    "cut distribution": (["+recipe=grpo", "sampling.top_p=0.9"], "sampling.top_p"),
    "greedy evaluation again and again": (
        ["+recipe=grpo", "eval_repeat_times=4"],
        "eval_repeat_times",
    ),
    "negative temperature": (["+recipe=grpo", "eval_sampling.temperature=-1"], "eval_sampling.temperature"),
    "rewards of single steps for a strategy of runs": (
        ["+recipe=multi_turn", "workflow.args.mode=step_wise", "workflow.args.step_reward=own"],
        "add_strategy",
    ),
    "shaped steps for a strategy of runs": (
        [
            "+recipe=multi_turn",
            "workflow.args.mode=step_wise",
            "+operators.overlong_penalty.args={max_length: 8, cache_length: 2}",
        ],
        "add_strategy",
    ),
    "filter alone": (
        ["+recipe=grpo", "add_strategy=reward_variance"],
        "add_strategy",
    ),
    "a baseline shifted twice": (
        ["+recipe=grpo", "add_strategy=asymre", "algorithm=asymre"],
        "algorithm.policy_loss",
    ),
    "no reward in the list": (["+recipe=grpo", "reward=[]"], "reward"),
    "engine of this process ahead": (
        ["+recipe=grpo", "explorer.sync_offset=1"],
        "explorer.sync_offset",
    ),
    "no such interval": (["+recipe=grpo", "explorer.sync_interval=0"], "explorer.sync_interval"),
    "weights by the wrong way": (
        ["+recipe=grpo", "synchronizer=checkpoint"],
        "synchronizer.method",
    ),
    "judge that is not there": (
        ["+recipe=grpo", "workflow=judge"],
        "workflow.args.judge",
    ),
    "judge of text that is to be shown pictures": (
        ["+recipe=grpo", "workflow=judge", "+auxiliary_models.a.model=tiny", "+workflow.args.judge_pictures=true"],
        "workflow.args.judge_pictures",
    ),
    "judge by a name that is not there": (
        ["+recipe=grpo", "workflow=judge", "+workflow.args.judge=umpire", "+auxiliary_models.umpir.model=tiny"],
        "workflow.args.judge",
    ),
    "operator that asks nobody": (
        ["+recipe=grpo", "operators=judge", "operators.judge.args.model=umpire", "+auxiliary_models.umpir.model=tiny"],
        "auxiliary_models",
    ),
    "misspelt key of an auxiliary model": (
        ["+recipe=grpo", "+auxiliary_models.judge.model=tiny", "+auxiliary_models.judge.ulr=x"],
        "auxiliary_models.judge.ulr",
    ),
    "auxiliary model without a name": (
        ["+recipe=grpo", "+auxiliary_models.judge.url=http://127.0.0.1:1/v1"],
        "auxiliary_models.judge",
    ),
    "evaluation as training": (["+recipe=grpo", "workflow.name=evaluation"], "workflow.name"),
    "seed of too many bits": (["+recipe=grpo", "seed=99999999999"], "seed"),
    "nothing to read": (["+recipe=offline"], "buffer.storage"),
    "nothing there to read": (["+recipe=offline", "buffer.path=nowhere"], "buffer.path"),
    "a place that nothing is kept in": (
        ["+recipe=grpo", "buffer.keep=true", "buffer.path=/x"],
        "buffer.path",
    ),
    "a dataset without a path": (["+recipe=dpo"], "buffer.path"),
    "a dataset that is not there": (["+recipe=dpo", "buffer.path=pairs.jsonl"], "buffer.path"),
    "a dataset of an empty path": (["+recipe=dpo", "buffer.path="], "buffer.path"),
    "a taskset of an empty path": (
        ["+recipe=grpo", "taskset.source=dataset", "taskset.path="],
        "taskset.path",
    ),
    "a file without the source that reads it": (
        ["+recipe=grpo", "taskset.path=tasks.jsonl"],
        "taskset.path",
    ),
    "a taskset of a name like the section's": (
        ["+recipe=grpo", "+tasksets={mine: {name: mine, source: dataset, path: ./my_taskset.jsonl}}"],
        "tasksets.mine.path",
    ),
    "how a dataset is read, and there is none": (
        ["+recipe=grpo", "buffer.dataset.max_length=9"],
        "buffer.dataset",
    ),
    "how many stored experiences are read, and there are none": (
        ["+recipe=grpo", "buffer.batch_size=8"],
        "buffer.batch_size",
    ),
    "stored experiences that are not read again, and there are none": (
        ["+recipe=grpo", "buffer.repeat=false"],
        "buffer.repeat",
    ),
    "preference pairs of a taskset": (
        ["+recipe=grpo", "algorithm=dpo"],
        "algorithm.policy_loss",
    ),
    "a loss of advantages on a dataset": (
        ["+recipe=dpo", "algorithm=ppo", "buffer.path=pairs"],
        "algorithm.policy_loss",
    ),
    "a constant length of a dataset that has none": (
        ["+recipe=sft", "buffer.path=pairs", "algorithm.loss_agg_mode=seq-mean-token-sum-norm"],
        "algorithm.loss_agg_mode",
    ),
    "a folder without steps": (["+recipe=offline", "buffer.path=."], "buffer.path"),
    "misspelt trainer key": (["+recipe=grpo", "trainer.max_epocs=4"], ["Did you mean 'trainer.max_epochs'"]),
    "checkpoints beside callbacks": (
        ["+recipe=grpo", "+trainer.enable_checkpointing=false"],
        "trainer.enable_checkpointing",
    ),
    "epochs beside steps": (
        ["+recipe=grpo", "trainer.max_epochs=4"],
        "trainer.max_epochs",
    ),
    **{
        f"training cut short by {plus}{key}": (
            ["+recipe=grpo", f"{plus}trainer.{key}={value}"],
            [f"trainer.{key} would", "set steps"],
        )
        for plus in ("", "+")
        for key, value in (
            ("limit_train_batches", "0"),
            ("overfit_batches", "0.1"),
            ("max_steps", "3"),
            ("min_epochs", "3"),
            ("fast_dev_run", "true"),
        )
    },
    "time limit within a step": (
        ["+recipe=grpo", "+trainer.max_time=00:01:00:00"],
        "trainer.max_time",
    ),
    "validation by Lightning": (
        ["+recipe=grpo", "+trainer.val_check_interval=2"],
        "trainer.val_check_interval",
    ),
    "unknown argument of the Trainer": (["+recipe=grpo", "+trainer.foo=1"], "trainer.foo"),
    "misspelt argument of the Trainer": (
        ["+recipe=grpo", "+trainer.detect_anomalies=true"],
        "trainer.detect_anomalies",
    ),
    "misspelt argument of a strategy": (
        ["+recipe=grpo", "trainer=fsdp2", "engine=vllm_server", "+trainer.strategy.timout=3"],
        "trainer.strategy.timout",
    ),
    "argument of a callback": (
        ["+recipe=grpo", "+callbacks.checkpoint.save_topk=3"],
        "callbacks.checkpoint.save_topk",
    ),
    "a key that W&B's logger does not have": (
        ["+recipe=grpo", "logger=wandb_offline", "+logger.wandb.projct=mine"],
        "logger.wandb.projct",
    ),
    "no logger": (["+recipe=grpo", "+logger.foo=1"], "logger.foo"),
    "a logger that cannot be imported": (
        ["+recipe=grpo", "+logger.mine={_target_: nowhere.Logger}"],
        "logger.mine._target_",
    ),
    "negative time-out of a strategy": (
        ["+recipe=grpo", "trainer=ddp", "trainer.strategy.timeout=-1"],
        "trainer.strategy.timeout",
    ),
    **{
        f"{devices} devices": (
            ["+recipe=grpo", "trainer=ddp", f"trainer.devices={devices}"],
            [f"trainer.devices is {devices}: give how many train", "CUDA_VISIBLE_DEVICES"],
        )
        for devices in ("two", "0", "-2", "[0, 1]")
    },
    "more processes than cores": (
        ["+recipe=grpo", "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=4096"],
        "trainer.devices",
    ),
    "all GPUs of a CPU": (
        ["+recipe=grpo", "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=-1"],
        "trainer.devices",
    ),
    "two machines without a launcher": (
        ["+recipe=grpo", "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "+trainer.num_nodes=2"],
        "trainer.num_nodes",
    ),
    "an accelerator that there is no policy for": (
        ["+recipe=grpo", "trainer.accelerator=tpu"],
        "trainer.accelerator",
    ),
    "wrong type": (
        ["+recipe=grpo", "explorer.batch_size=many"],
        ["batch_size is 'many': give a whole number."],
    ),
    "a number for text": (
        ["+recipe=grpo", "sampling.stop=3"],
        ["sampling.stop holds several values: give a list, [A,B]."],
    ),
    "text for a number": (["+recipe=grpo", "optimizer.lr=fast"], ["optimizer.lr is 'fast': give a number."]),
    "text for a switch": (["+recipe=grpo", "save_model=perhaps"], ["save_model is 'perhaps': give true or false."]),
    **{
        f"a number for the switch {key}": (["+recipe=grpo", f"{key}={value}"], [f"{key} is '{value}': give true or"])
        for key, value in (("save_model", 3), ("model.lora.rslora", 1), ("engine.per_rank", 2))
    },
    "a number for a switch with auto": (
        ["+recipe=grpo", "model.compile=2"],
        ["model.compile is '2': give true, false or"],
    ),
    "text for a switch with auto": (["+recipe=grpo", "model.compile=perhaps"], "model.compile"),
    "a number for a switch in a text": (["+recipe=grpo", "save_model='1'"], ["save_model is '1': give true or false."]),
    "a score that no evaluation measures": (
        ["+recipe=grpo", "sweep.metric=eval/sums/mean@1"],
        "sweep.metric",
    ),
    "a score without evaluations": (
        ["+recipe=grpo", "sweep.metric=eval/addition_heldout/mean@1", "explorer.eval_interval=0"],
        "sweep.metric",
    ),
    "a score that is no metric": (["+recipe=grpo", "sweep.metric=rewrad"], "sweep.metric"),
    "a component without a threshold": (
        ["+recipe=grpo", "reward_solved=right"],
        "reward_solved",
    ),
    "a threshold that is no number": (["+recipe=grpo", "reward_solved={right: x}"], "reward_solved.right"),
    "null for a section": (
        ["+recipe=grpo", "sampling=null"],
        ["sampling cannot be null: give {KEY: VALUE}, or leave it out: '~sampling'."],
    ),
    "null for an inner section": (
        ["+recipe=grpo", "model.lora=null"],
        ["model.lora cannot be null: give {KEY: VALUE}, or leave it out."],
    ),
    "null for a number": (["+recipe=grpo", "steps=null"], ["steps cannot be null: give a value."]),
    "a number for a section": (["+recipe=grpo", "workflow.args=3"], ["workflow.args has keys: give {KEY: VALUE}."]),
    "a mapping for text": (["+recipe=grpo", "name={a: 1}"], ["name", "give some text."]),
    "a setting of a choice that was not made": (
        ["+recipe=grpo", "callbacks.profiler.step=5"],
        ["'callbacks.profiler' is not there: choose it first, callbacks=profiler."],
    ),
    "arguments of a bare name": (
        ["+recipe=grpo", "algorithm.policy_loss=ppo", "algorithm.policy_loss.args.dual_clip=3"],
        ["'algorithm.policy_loss' is a bare name", "give algorithm.policy_loss.name=NAME as well as"],
    ),
    "a name that cannot be left out": (["+recipe=grpo", "~taskset.name"], ["taskset.name cannot be left out"]),
    "arguments of the loss by their old key": (
        ["+recipe=grpo", "algorithm.policy_loss_args.clip_range_low=0.1"],
        ["unknown key 'algorithm.policy_loss_args'. It is called algorithm.policy_loss.args."],
    ),
    "an argument of a strategy beside its args": (
        ["+recipe=grpo", "add_strategy.grpo.epsilon=0.1"],
        ["unknown key 'add_strategy.grpo.epsilon'. Arguments go into", "add_strategy.grpo.args.epsilon=VALUE"],
    ),
    "the same, added past Hydra": (
        ["+recipe=grpo", "+add_strategy.rloo.tau=0.1"],
        "add_strategy.rloo.tau",
    ),
    "a filter of groups of one": (
        ["+recipe=grpo", "add_strategy=[dapo,grpo]", "explorer.repeat_times=1"],
        "explorer.repeat_times",
    ),
    "a group of one that is compared": (
        ["+recipe=grpo", "explorer.repeat_times=1"],
        "explorer.repeat_times",
    ),
    "a group of one, compared behind another strategy": (
        ["+recipe=grpo", "add_strategy=[reinforce,step_wise_grpo]", "explorer.repeat_times=1"],
        "explorer.repeat_times",
    ),
    "a negative seed": (["+recipe=grpo", "seed=-1"], "seed"),
    "shared prefixes of another attention": (
        ["+recipe=grpo", "algorithm.layout=shared_prefix", "model.attn_implementation=eager"],
        "algorithm.layout",
    ),
    "wrong choice": (
        ["+recipe=grpo", "model.dtype=fp31"],
        ["model.dtype is 'fp31': give one of auto, bf16, fp16, fp32."],
    ),
    "no room for a prompt": (
        ["+recipe=grpo", "sampling.max_tokens=256"],
        "sampling.max_tokens",
    ),
    "a folder as a choice of models": (
        ["+recipe=grpo", "model=/my_model"],
        ["unknown model '/my_model'", "model=custom model.name=FOLDER"],
    ),
    "own engine as a choice": (
        ["+recipe=grpo", "engine=my.Engine"],
        "engine.name",
    ),
    "unknown group choice": (["+recipe=grpo", "engine=vlm"], ["unknown engine 'vlm'", "Did you mean 'vllm'"]),
    "missing model folder": (
        ["+recipe=grpo", "model=custom", "model.name=./missing"],
        "model.name",
    ),
    "unknown model": (["+recipe=grpo", "model=custom", "model.name=smolm2"], "model.name"),
    "unknown workflow": (["+recipe=grpo", "workflow.name=mth"], "workflow.name"),
    "reward that cannot be imported": (["+recipe=grpo", "reward=nowhere.reward"], ["no module 'nowhere'"]),
    "unknown task source": (["+recipe=grpo", "taskset.source=reasoning"], "taskset.source"),
    "unknown loss": (["+recipe=grpo", "algorithm.policy_loss=grop"], "algorithm.policy_loss"),
    "unknown strategy": (
        ["+recipe=grpo", "+add_strategy.rlo={}"],
        "add_strategy.rlo",
    ),
    "unknown operator": (
        ["+recipe=grpo", "+operators.reward_filtr={}"],
        "operators.reward_filtr",
    ),
    "unknown group of operators": (["+recipe=grpo", "operators=judg"], ["Did you mean 'judge'"]),
    "misspelt key of an operator": (
        ["+recipe=grpo", "operators=reward_filter", "+operators.reward_filter.arg.threshold=1"],
        "operators.reward_filter.arg",
    ),
    "wrong choice of an operator": (
        ["+recipe=grpo", "operators=reward_filter", "operators.reward_filter.on_error=ignore"],
        "operators.reward_filter.on_error",
    ),
    "no strategy": (["+recipe=grpo", "~add_strategy"], "add_strategy"),
    "key of a taskset that is not there": (
        ["+recipe=grpo", "+eval_tasksets.mine.path=mine.jsonl"],
        ["'eval_tasksets.mine' is not there yet", "'+eval_tasksets={mine: {name: mine, path: mine.jsonl}}'"],
    ),
    "key of a taskset": (
        ["+recipe=grpo", "+eval_tasksets.addition_heldout.sizee=3"],
        "eval_tasksets.addition_heldout.sizee",
    ),
    "more prompts than a step can hold": (
        ["+recipe=grpo", "explorer.batch_size=1000000000"],
        "explorer.batch_size",
    ),
    "clipping by Lightning, without a plus": (
        ["+recipe=grpo", "trainer.gradient_clip_val=1"],
        ["trainer.gradient_clip_val: the policy clips gradients, set algorithm.max_grad_norm."],
    ),
    "clipping by Lightning": (
        ["+recipe=grpo", "+trainer.gradient_clip_val=1.0"],
        "trainer.gradient_clip_val",
    ),
    "accumulation by Lightning": (
        ["+recipe=grpo", "+trainer.accumulate_grad_batches=4"],
        "trainer.accumulate_grad_batches",
    ),
    "two nodes": (["+recipe=grpo", "+trainer.num_nodes=2"], "trainer.num_nodes"),
    "16-bit float": (["+recipe=grpo", "+trainer.precision=16-mixed"], "trainer.precision"),
    "two devices": (["+recipe=grpo", "trainer.devices=2"], "trainer.devices"),
    "another strategy": (
        ["+recipe=grpo", "+trainer.strategy=deepspeed"],
        "trainer.strategy",
    ),
    "mixed precision of float16": (
        ["+recipe=grpo", "model.dtype=fp16", "+trainer.precision=bf16-mixed"],
        "trainer.precision",
    ),
    "mixed precision of shards": (
        ["+recipe=grpo", "trainer=fsdp2", "+trainer.precision=bf16-mixed"],
        "trainer.precision",
    ),
    "the host's optimizer of shards": (
        ["+recipe=grpo", "trainer=fsdp2", "optimizer.name=adamw_offload"],
        "optimizer.name",
    ),
    "compiled shards": (["+recipe=grpo", "trainer=fsdp2", "model.compile=true"], "model.compile"),
    "checkpoints in shards": (
        ["+recipe=grpo", "trainer=fsdp2", "trainer.strategy.save_distributed_checkpoint=always"],
        "trainer.strategy.save_distributed_checkpoint",
    ),
    "an engine that shares shards": (
        ["+recipe=grpo", "trainer=fsdp2", "engine=transformers"],
        "engine",
    ),
    "an engine in each of one process": (
        ["+recipe=grpo", "engine.per_rank=true"],
        "engine.per_rank",
    ),
    "an engine in each process of two machines": (
        ["+recipe=grpo", "trainer=ddp", "+trainer.num_nodes=2", "engine.per_rank=true"],
        "engine.per_rank",
    ),
    "adapters for an engine in each process": (
        ["+recipe=lora", "trainer=ddp", "engine.per_rank=true", "synchronizer.lora=adapter"],
        "synchronizer.lora",
    ),
    "servers in each process": (
        ["+recipe=grpo", "engine=vllm_server", "trainer=ddp", "engine.per_rank=true"],
        "engine.per_rank",
    ),
    "a strategy over trainer=ddp": (
        ["+recipe=grpo", "trainer=ddp", "trainer.strategy=fsdp"],
        "trainer.strategy",
    ),
    "a taskset under another key": (
        ["+recipe=grpo", "eval_tasksets.addition_heldout.order=upwards"],
        "eval_tasksets.addition_heldout.order",
    ),
    "a size of what has one": (
        ["+recipe=grpo", "taskset=dataset", "taskset.path=org/name", "taskset.size=5"],
        "taskset.size",
    ),
    "a split of what has none": (
        ["+recipe=grpo", "taskset=reasoning_gym", "taskset.split=test"],
        "taskset.split",
    ),
    "an argument of a workflow that has none": (
        ["+recipe=grpo", "+workflow.args.foo=1"],
        ["unknown workflow.args of MathWorkflow: 'foo'", "Known: system_prompt."],
    ),
    "a teacher's tokens without a teacher": (
        ["+recipe=grpo", "algorithm=teacher_kl"],
        "operators",
    ),
    "a teacher that is not there": (
        ["+recipe=grpo", "algorithm=teacher_kl", "operators=teacher_top_k"],
        "auxiliary_models",
    ),
    "more of a teacher's tokens than there are": (
        [*TAUGHT, "model=tiny", "operators.teacher_top_k.args.k=1000"],
        "operators",
    ),
    "a teacher with too short a context": (
        [*TAUGHT, "engine.max_model_len=512", "+auxiliary_models.teacher.engine.max_model_len=512"],
        "auxiliary_models.teacher.engine.max_model_len",
    ),
    "a teacher of sampled tokens with too short a context": (
        [*BY_SAMPLED_TOKENS, "engine.max_model_len=512", "+auxiliary_models.teacher.engine.max_model_len=512"],
        "auxiliary_models.teacher.engine.max_model_len",
    ),
    "a teacher of sampled tokens that only chats": (
        [*BY_SAMPLED_TOKENS, "+auxiliary_models.teacher.url=http://127.0.0.1:1/v1"],
        "auxiliary_models.teacher.url",
    ),
    "a teacher that may fail": (
        [*TAUGHT, "+operators.teacher_top_k.on_error=skip"],
        "operators",
    ),
    "a mixture of a loss that is none of rollouts": (
        ["+recipe=mix", "+algorithm.policy_loss.args.usual=teacher_kl"],
        "algorithm.policy_loss.args.usual",
    ),
    "a teacher at another temperature": (
        [*TAUGHT, "sampling.temperature=0.7"],
        "sampling.temperature",
    ),
    "a stream of expert data that are not there": (
        [*STREAM, f"{STREAMS}.expert={{loss: sft, tokens: expert}}"],
        "algorithm.policy_loss",
    ),
    "expert data that are in no stream": (
        [*STREAM, f"{STREAMS}.rl.loss=ppo", "buffer.expert.per_step=2", "buffer.expert.dataset.source=addition"],
        "buffer.expert.per_step",
    ),
    "observations of one turn": (
        [*STREAM, f"{STREAMS}.tools={{loss: sft, tokens: observations}}"],
        "algorithm.policy_loss.args.streams.tools",
    ),
    "observations of single steps": (
        [
            "+recipe=streams",
            TEACHER,
            "workflow.args.mode=step_wise",
            "add_strategy=step_wise_grpo",
        ],
        "algorithm.policy_loss.args.streams.tools",
    ),
    "a stream's unknown key": (
        [*STREAM, f"{STREAMS}.rl.wieght=2"],
        "algorithm.policy_loss.args.streams.rl.wieght",
    ),
    "two strategies that weigh": (
        ["+recipe=grpo", "add_strategy=[rloo,grpo]"],
        "add_strategy",
    ),
    "two strategies that weigh, the first with a threshold of null": (
        ["+recipe=grpo", "add_strategy=[grpo,rloo]"],
        "add_strategy",
    ),
    "a critic behind a strategy that weighs": (
        ["+recipe=ppo", "add_strategy=[grpo,critic]", "explorer.repeat_times=8"],
        "add_strategy",
    ),
    "a teacher of sampled tokens at another temperature": (
        [*BY_SAMPLED_TOKENS, "sampling.temperature=0.7"],
        "sampling.temperature",
    ),
    "a plus sign too many": (
        [*BY_SAMPLED_TOKENS, "+add_strategy.on_policy_distill.args.kl_coef=-1"],
        ["'add_strategy.on_policy_distill.args.kl_coef' is set already: leave out the plus sign"],
    ),
    "a critic that does not learn": (["+recipe=ppo", "algorithm.critic.lr=0"], "algorithm.critic.lr"),
    "a key of other libraries": (["+recipe=grpo", "algorithm.kl_coef=0.1"], ["It is called algorithm.kl.coef."]),
    "a split without a name": (
        ["+recipe=sft", "buffer.path=pairs", "buffer.dataset.split="],
        "buffer.dataset.split",
    ),
    "a value model that is not there": (
        ["+recipe=ppo", "model=tiny", "algorithm.critic.model=smolm2"],
        "algorithm.critic.model",
    ),
    "a value model with another vocabulary": (
        ["+recipe=ppo", "model=tiny", "algorithm.critic.model=smollm2"],
        "algorithm.critic.model",
    ),
    "distillation without a teacher": (
        ["+recipe=grpo", "add_strategy=on_policy_distill"],
        "add_strategy",
    ),
    "a key of another command": (["+recipe=grpo", "plan.device=L4"], ["python -m trinity_lightning.plan"]),
    "a penalty of none": (
        ["+recipe=grpo", "algorithm.kl={name: none, coef: 0.1}"],
        "algorithm.kl.coef",
    ),
    "an estimate of the KL without a weight": (
        ["+recipe=grpo", "algorithm.kl.name=k2"],
        "algorithm.kl.name",
    ),
    "an estimate of the critic's KL without a weight": (
        ["+recipe=ppo", "algorithm.critic.kl_name=k3"],
        "algorithm.critic.kl_name",
    ),
    "misspelt estimate of the KL": (["+recipe=grpo", "algorithm.kl.name=k33"], "algorithm.kl.name"),
    "a range of weights reversed": (
        ["+recipe=grpo", "algorithm.rollout_correction={low: 3, high: 2}"],
        "algorithm.rollout_correction.low",
    ),
    "a warm-up longer than the run": (
        ["+recipe=grpo", "optimizer.warmup_steps=24"],
        "optimizer.warmup_steps",
    ),
    "a schedule shorter than the run": (
        ["+recipe=grpo", "optimizer.lr_scheduler=cosine", "optimizer.total_steps=5", "algorithm.optimizer_steps=2"],
        "optimizer.total_steps",
    ),
    "a critic that warms up for the whole run": (
        ["+recipe=ppo", "steps=4", "algorithm.critic.warmup_steps=8"],
        "algorithm.critic.warmup_steps",
    ),
    "a negative stream": (
        [*STREAM, f"{STREAMS}={{rl: {{}}, tools: {{loss: sft, weight: -1}}}}"],
        "algorithm.policy_loss.args.streams.tools.weight",
    ),
    "streams without weight": ([*STREAM, f"{STREAMS}.rl.weight=0"], "algorithm.policy_loss.args.streams"),
    "a teacher that no strategy weighs by": (
        ["+recipe=grpo", "workflow=on_policy_distill", f"+{TEACHER}"],
        "workflow",
    ),
    "an auxiliary model that nothing asks": (
        ["+recipe=grpo", f"+{TEACHER}"],
        "auxiliary_models.teacher",
    ),
    "true for a number": (["+recipe=grpo", "steps=true"], ["steps is true: give a whole number."]),
    "false for a number": (["+recipe=grpo", "optimizer.lr=false"], ["optimizer.lr is false: give a number."]),
    "true for a number or auto": (
        ["+recipe=grpo", "algorithm.max_tokens_per_micro_batch=true"],
        ["algorithm.max_tokens_per_micro_batch is true: give a whole number or a name."],
    ),
    "no learning rate": (["+recipe=grpo", "optimizer.lr=0"], "optimizer.lr"),
    "arguments that displace the name": (
        ["+recipe=grpo", "algorithm.policy_loss=my_loss.tempered", "+algorithm.policy_loss.args.tau=2"],
        "algorithm.policy_loss",
    ),
    "a workflow's teacher that is not there": (
        ["+recipe=grpo", "workflow=on_policy_distill", "add_strategy=on_policy_distill"],
        "workflow.args.teacher",
    ),
    "reversed gradients": (["+recipe=grpo", "algorithm.max_grad_norm=-1"], "algorithm.max_grad_norm"),
    "a loss of a mixture that is no name": (
        ["+recipe=mix", "explorer.sync_interval=2", "+algorithm.policy_loss.args.usual={a: 1}"],
        "algorithm.policy_loss.args.usual",
    ),
    "missing checkpoint": (["+recipe=grpo", "ckpt_path=missing.ckpt"], "ckpt_path"),
    "several values without a sweep": (["+recipe=grpo", "seed=1,2"], ["seed has", "--multirun", "seed=[1,2]"]),
    "a recipe without its plus sign": (["recipe=grpo"], ["recipe is not chosen yet", "+recipe=grpo."]),
    "spaces around the equals sign": (["+recipe=grpo", "seed", "=", "3"], ["give seed=VALUE, without spaces"]),
    "a taskset added as one of several": (
        ["+recipe=grpo", "+eval_tasksets.mine={source: addition}"],
        ["'+eval_tasksets={mine: {source: addition}}'"],
    ),
    "examples in a file of code": (["+recipe=sft", f"buffer.path={__file__}"], "buffer.path"),
    "tasks in a file of code": (["+recipe=grpo", "taskset=dataset", f"taskset.path={__file__}"], "taskset.path"),
    "a callback that is not there": (["+recipe=grpo", "+callbacks.a._target_=my_calls.C"], "callbacks.a._target_"),
}


# Runs the console entry point and then says which of the slow imports have happened.
DOOR = """
import sys
from trinity_lightning.train import main
try:
    main()
except SystemExit as stop:
    print("exit", stop.code, [name for name in ("torch", "lightning", "transformers", "vllm") if name in sys.modules])
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", BY_THE_COMMAND)
def test_refused_at_once_with_one_sentence(case: str, tmp_path: Path) -> None:
    """At once: before anything that takes seconds is imported."""
    arguments, expected = BY_THE_COMMAND[case]
    (tmp_path / "taken").touch()
    done = subprocess.run(
        [sys.executable, "-c", DOOR, *arguments], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.stdout == "exit 2 []\n", done.stdout + done.stderr
    assert all(part in done.stderr for part in expected), done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2
    assert "Error executing job" not in done.stderr
    assert "while resolving" not in done.stderr
    assert not (tmp_path / "outputs").exists()  # nothing is left of it


SMALL_GRPO = ["+recipe=grpo", "model=tiny", "engine=transformers"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["trainer=gpu"], "trainer.accelerator"),
        (["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=999"], "trainer.devices"),
        (["workflow=my_flow_nearby.Flow"], "workflow.name"),
        (["reward=my_rewards_nearby.count"], "my_rewards_nearby"),
        (["+callbacks.mine._target_=my_calls_nearby.Count"], "callbacks.mine._target_"),
        (["--lr", "1e-5"], "optimizer.lr=1e-5"),
    ],
)
def test_wrong_parts_and_devices_are_refused_at_once(arguments: list[str], key: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DOOR, *SMALL_GRPO, *arguments],
        cwd=tmp_path,
        env=environment() | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    if "trainer=gpu" in arguments and has_driver():
        assert "exit 2" in done.stdout  # torch has to be asked
    else:
        assert done.stdout == "exit 2 []\n", done.stdout + done.stderr
    assert key in done.stderr
    assert not list(tmp_path.glob("outputs/*/*"))


@pytest.mark.slow
def test_an_evaluation_of_no_checkpoint_is_refused_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DOOR.replace("lightning.train", "lightning.evaluate")]
    command += ["+recipe=grpo", "model=tiny", "ckpt_path=last"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.stdout == "exit 2 []\n", done.stdout + done.stderr
    assert "ckpt_path=last: there is no checkpoint under outputs/grpo" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("program", ["train", "evaluate", "plan"])
def test_help_shows_how_a_command_is_written_and_no_configuration(program: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"trinity_lightning.{program}", "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr, list(tmp_path.iterdir())) == (0, "", [])
    for part in (f"  python -m trinity_lightning.{program} +recipe=grpo", "algorithm: ", "recipe: ", "--cfg job"):
        assert part in done.stdout
    assert len(done.stdout.splitlines()) <= 40  # a screen, with a line for each other command


def test_without_arguments_nothing_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["trinity-lightning"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "+recipe=grpo" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_help_that_nobody_reads_ends_in_silence() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "trinity_lightning.train", "--help"]
    done = subprocess.run(command, env=environment(), stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


def test_a_plan_refuses_an_engine_in_every_process_where_only_one_trains() -> None:
    with refuses("engine.per_rank"):
        validate(composed("+recipe=grpo", "model=tiny", "engine.per_rank=true"), here=False)


def test_an_estimate_without_a_weight_is_refused_of_a_run_alone() -> None:
    """A checkpoint of an earlier version may hold one, and is loaded."""
    assert (KLConfig(name="k2").coef, CriticConfig(kl_name="k3").kl_coef) == (0, 0)


def refusal(case: str) -> BaseException:
    """The error with which a command of `REFUSED` ends, by the rules that it applies before it loads anything."""
    with pytest.raises(CONFIG_ERRORS) as refused:
        check(composed(*REFUSED[case][0], "output_dir=x"))
    return refused.value


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_one_sentence(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule of ours names the key; for an error of Hydra or OmegaConf, which has none, the words are our work."""
    monkeypatch.chdir(tmp_path)
    error, expected = refusal(case), REFUSED[case][1]
    sentence = explain(error)
    if isinstance(expected, str):
        assert (error.key if isinstance(error, ConfigError) else error.full_key) == expected, sentence  # type: ignore[attr-defined]
    else:
        assert all(part in sentence for part in expected), sentence
    assert len(sentence.splitlines()) <= 2
    assert "while resolving" not in sentence


def test_some_refusals_read_as_these_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For people to read: a change of these sentences is a diff of golden/refusals.txt."""
    monkeypatch.chdir(tmp_path)
    lines = [line for line in REFUSALS.read_text().splitlines() if line and not line.startswith("#")]
    cases, sentences = lines[::2], [line.strip() for line in lines[1::2]]
    assert [explain(refusal(case)) for case in cases] == sentences


TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "3", "GROUP_WORLD_SIZE": "1"}
SRUN = {"SLURM_NTASKS": "4", "SLURM_NNODES": "2"}


@pytest.mark.parametrize(
    ("variables", "arguments", "sentence"),
    [
        (TORCHRUN, (), "torchrun has started 3 .*, or give trainer.devices=3 .trainer.num_nodes=1"),
        (TORCHRUN | {"GROUP_WORLD_SIZE": "2"}, (), "asks for 2 .*: start as many.$"),  # 2 on one, 1 on the other
        (SRUN, (), "srun has started 4 .* .machines: 2., .*, or give trainer.devices=2 .trainer.num_nodes=2"),
        (SRUN | {"SLURM_NTASKS": "2"}, (), "srun has started 2"),
        (SRUN, ("+trainer.num_nodes=2",), None),
        (SRUN | {"SLURM_JOB_NAME": "bash"}, (), None),
    ],
)
def test_another_number_of_processes_than_was_started_is_refused(
    variables: dict[str, str], arguments: tuple[str, ...], sentence: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = composed("+recipe=grpo", "model=tiny", *TWO, *arguments)
    with nullcontext() if sentence is None else pytest.raises(ConfigError, match=sentence):
        check_launched(config.trainer)
    validate(config)  # as an evaluation does, which is one process


@pytest.mark.parametrize(
    ("recipe", "arguments"),
    [
        ("sft", ["engine.max_model_len=64"]),  # which sampling.max_tokens would not leave room for
        ("sft", ["~add_strategy"]),
        ("offline", ["sampling.max_tokens=8", "engine.max_model_len=64"]),
        ("ppo", ["buffer=file", "algorithm.critic=null", "algorithm.optimizer_steps=1", "algorithm.inner_epochs=1"]),
    ],
)
def test_without_rollouts_nothing_is_asked_of_what_is_not_read(
    recipe: str, arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "step_1.trxp").touch()
    (tmp_path / "examples.jsonl").touch()
    place = tmp_path / "examples.jsonl" if recipe == "sft" else tmp_path
    command = (f"+recipe={recipe}", "model=tiny", f"buffer.path={place}", *arguments)
    validate(composed(*command))


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('{"question": "1 + 1"}', "prompt_field"),
        ('{"prompt": }', "path"),
    ],
)
@pytest.mark.parametrize("section", ["taskset", "eval_tasksets.addition_heldout"])
def test_a_file_of_tasks_is_read_before_a_model_is_looked_for(
    section: str, line: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("trinity_lightning.train.check_models")
    (tmp_path / "tasks.jsonl").write_text(line)
    place = (f"{section}.source=dataset", f"++{section}.path={tmp_path / 'tasks.jsonl'}", f"++{section}.split=train")
    with refuses(f"{section}.{key}"):
        check(composed("+recipe=grpo", "model=tiny", *place))


def test_a_critic_without_rollouts_or_a_strategy_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "step_1.trxp").touch()
    config = composed("+recipe=ppo", "model=tiny", "buffer=file", f"buffer.path={tmp_path}", "~add_strategy")
    with refuses("algorithm.critic"):
        validate(config)


@pytest.mark.parametrize("taught", [TAUGHT, BY_SAMPLED_TOKENS, [*BY_SAMPLED_TOKENS, "+workflow.args.teacher=teacher"]])
def test_a_teacher_has_room_for_the_policys_longest_sequence(taught: list[str]) -> None:
    judge = ("+auxiliary_models.judge.model=tiny", "+operators.judge.args.model=judge")
    run = validate(composed(*taught, *judge, "model=tiny", "engine.max_model_len=300"))
    assert run.auxiliary_models["teacher"].engine.max_model_len == 301
    assert run.auxiliary_models["judge"].engine.max_model_len == 1024


@pytest.mark.slow
@pytest.mark.parametrize("taught", [TAUGHT, BY_SAMPLED_TOKENS])
def test_a_teacher_with_another_vocabulary_is_refused(taught: list[str]) -> None:
    with refuses("auxiliary_models.teacher.model"):
        check_models(validate(composed(*taught, "model=smollm2")))
    check_models(validate(composed(*taught, "model=tiny")))


def test_groups_of_one_are_for_strategies_that_compare_nothing() -> None:
    validate(composed("+recipe=grpo", "model=tiny", "add_strategy=reinforce", "explorer.repeat_times=1"))


def test_a_name_that_is_not_in_a_module_is_looked_for_among_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rewards_of_today.py").write_text(
        "import math\nfrom pathlib import Path\nLIMIT = 3\ndef note(response, task):\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"Did you mean 'note'\? Known: LIMIT, note\.$"):
        import_object("my_rewards_of_today.nope")


@pytest.mark.parametrize("section", ["eval_tasksets", "tasksets", "auxiliary_models"])
def test_a_section_may_be_left_out(section: str) -> None:
    config = composed("+recipe=grpo", "model=tiny", f"~{section}", "output_dir=x")
    validate(config)
    assert config[section] == {}


def refused_objective(*overrides: str) -> str:
    """The sentence that refuses the objective of a run with these overrides."""
    config = composed("+recipe=grpo", "model=tiny", *overrides)
    with pytest.raises((ValueError, TypeError)) as refused:
        Objective(typed_config(config).algorithm)
    return str(refused.value)


ARGUMENTS = "algorithm.policy_loss.args"
PAIRS = ("algorithm=dpo", "buffer=dataset", "buffer.path=pairs")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((f"{ARGUMENTS}.clip_range_low=abc",), "'clip_range_low' of policy loss 'grpo' is 'abc': give a number."),
        ((f"{ARGUMENTS}.clip_range_low=true",), "is True: give a number."),
        ((f"{ARGUMENTS}.dual_clip=[1]",), "is [1]: give a number or null."),
        ((f"{ARGUMENTS}.clip_range_low=-1",), f"{ARGUMENTS}.clip_range_low is -1: give a finite number of 0 or more."),
        ((f"{ARGUMENTS}.clip_range_lo=0.1",), "'clip_range_lo'. Did you mean 'clip_range_low'"),
        (("algorithm=gspo", f"{ARGUMENTS}.dual_clip=3"), "Known: clip_range_high, clip_range_low."),
        ((f"{ARGUMENTS}.loss_agg_mode=token-men",), "set algorithm.loss_agg_mode"),
        (("algorithm=mix", f"{ARGUMENTS}.mu=1.5"), f"{ARGUMENTS}.mu is 1.5: give a number from 0 to 1"),
        (
            ("algorithm=mix", f"{ARGUMENTS}.usual_args.clip_range_high=x"),
            "'clip_range_high' of policy loss 'ppo' is 'x'",
        ),
        (("algorithm.policy_loss=nowhere.loss",), "no module 'nowhere'"),
        ((*PAIRS, f"{ARGUMENTS}.label_smoothing=0.5"), "label_smoothing is 0.5: give a number from 0 to below 0.5."),
        ((*PAIRS, f"{ARGUMENTS}.beta=0"), f"{ARGUMENTS}.beta is 0: give a finite number above 0."),
        ((*PAIRS, "algorithm.loss_agg_mode=token-mean"), "policy loss 'dpo' has an average of its own: leave it out."),
        (("algorithm=sapo", f"{ARGUMENTS}.tau_negative=0"), "tau_negative is 0: give a finite number above 0."),
        (("algorithm=rec", f"{ARGUMENTS}.clip_mode=ring", f"{ARGUMENTS}.epsilon_low=0.8"), "begin the ring"),
        ((*PAIRS, f"{ARGUMENTS}.reference_free=true", "algorithm.kl.coef=0.1"), "(or, with reference_free, has none)"),
    ],
)
def test_arguments_of_the_loss_are_checked_before_a_model_is_loaded(overrides: tuple[str, ...], expected: str) -> None:
    assert expected in refused_objective(*overrides)


def test_what_a_callback_refuses_keeps_its_sentence() -> None:
    with pytest.raises(ConfigError, match=r"^callbacks\.profiler\.step is 0: give a whole number of 1 or more\.$"):
        instantiate({"_target_": "trinity_lightning.monitor.profiler.StepProfiler", "folder": "x", "step": 0})


@pytest.mark.slow
def test_an_argument_of_the_loss_is_refused_by_the_command(tmp_path: Path) -> None:
    """At once: the signature is read from the source."""
    arguments = ["+recipe=grpo", "model=tiny", f"{ARGUMENTS}.clip_range_low=abc"]
    done = subprocess.run(
        [sys.executable, "-c", DOOR, *arguments], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.stdout == "exit 2 []\n", done.stdout + done.stderr
    assert "is 'abc': give a number." in done.stderr
    assert not list(tmp_path.glob("outputs/*/*"))


def test_vllm_not_installed_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed("+recipe=grpo", "model=tiny")
    validate(config)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "vllm" else find_spec(name, *a))
    with refuses("engine") as refused:
        validate(config)
    assert "choose engine=transformers" in str(refused.value.fix)


def write_tasks(folder: Path, prompts: list[str]) -> None:
    lines = [json.dumps({"prompt": prompt, "answer": "1"}) for prompt in prompts]
    (folder / "tasks.jsonl").write_text("\n".join(lines))


CRITIC = ("algorithm=ppo_critic", "add_strategy=critic")
QUICK = ("+recipe=grpo", "model=tiny", "taskset=dataset", "taskset.path=tasks.jsonl", "logger=csv", "steps=1")
QUICK += (
    "explorer.eval_on_startup=false",
    "explorer.eval_interval=0",
    "explorer.batch_size=4",
    "explorer.repeat_times=4",
    "sampling.max_tokens=8",
)


def test_failed_tasks_are_counted_and_the_run_goes_on(run_train: RunTrain, tmp_path: Path) -> None:
    """One prompt is longer than the context, one makes the reward raise: the other two are trained on."""
    write_tasks(tmp_path, ["short", "long" * 200, "raise", "fine"])
    (tmp_path / "my_reward.py").write_text(
        "def reward(response, task):\n"
        "    if task.raw_task['prompt'] == 'raise':\n"
        "        raise RuntimeError('no reward for this one')\n"
        "    return sum(map(str.isdigit, response)) / max(len(response), 1)\n"
    )
    done = run_train(tmp_path, *QUICK, "reward=my_reward.reward")
    assert done.returncode == 0, done.stdout[-4000:]
    assert "prompt_truncated" in done.stdout
    assert "RuntimeError: no reward for this one" in done.stdout
    [path] = tmp_path.glob("outputs/grpo/*/metrics.csv")
    with path.open() as file:
        [row] = [row for row in csv.DictReader(file) if row["reward/mean"]]
    assert (float(row["rollout/tasks"]), float(row["rollout/failed_tasks"])) == (4, 2)
    assert float(row["rollout/experiences"]) == 8


def test_a_step_of_which_nothing_succeeded_stops_the_run(run_train: RunTrain, tmp_path: Path) -> None:
    write_tasks(tmp_path, ["one", "two"])
    (tmp_path / "my_reward.py").write_text("def reward(response, task):\n    return 'not a number'\n")
    done = run_train(tmp_path, *QUICK, "reward=my_reward.reward")
    assert done.returncode == 1
    assert "none of its 4 tasks gave an experience" in done.stdout
    assert "expected a finite number" in done.stdout
    assert "Traceback" not in done.stdout
    [log] = tmp_path.glob("outputs/grpo/*/train.log")
    assert "RewardError" in log.read_text()


def test_a_resume_that_cannot_work_is_refused_and_leaves_the_record_alone(run_train: RunTrain, tmp_path: Path) -> None:
    write_tasks(tmp_path, ["one", "two", "three", "four"])
    (tmp_path / "my_reward.py").write_text("def reward(response, task):\n    return float(len(set(response)))\n")
    quick = (*QUICK, "reward=my_reward.reward", "engine=transformers", "algorithm.max_tokens_per_micro_batch=auto")
    assert run_train(tmp_path, *quick, "steps=2").returncode == 0
    [record] = tmp_path.glob("outputs/grpo/*/config.yaml")
    before = record.read_text()
    assert OmegaConf.load(record).algorithm.max_tokens_per_micro_batch in CPU_TOKENS  # what auto stood for
    (tmp_path / "garbage.ckpt").write_bytes(b"garbage")
    for arguments, message in (
        (("ckpt_path=last", "steps=1"), "was written after step 2: give more steps"),
        (("ckpt_path=last", "steps=3", "model=smollm2"), "the checkpoint's run trains tiny"),
        (("ckpt_path=garbage.ckpt", "steps=3"), "'garbage.ckpt' is no checkpoint of a training run"),
        (("ckpt_path=last", "steps=3", *CRITIC), "algorithm.critic is a value head, and that of the checkpoint"),
        (("ckpt_path=last", "steps=3", "model.lora.r=4"), "no adapters: leave model.lora out."),
        (("ckpt_path=last", "steps=2", "seed=7"), "seed is 7, and that of the run to resume is 42: choose that one."),
        (
            ("ckpt_path=last", "steps=3", "optimizer.name=torch.optim.SGD"),
            "optimizer.name is torch.optim.SGD, and the checkpoint's optimizer is adamw: set optimizer.name=adamw.",
        ),
    ):
        done = run_train(tmp_path, *quick, *arguments)
        assert done.returncode == 2, done.stdout[-3000:]
        assert message in done.stdout
        assert "Traceback" not in done.stdout
        assert "resumed from" not in done.stdout  # the table at the start
        assert "are done" not in done.stdout  # which is warned of once nothing is refused
        assert record.read_text() == before
    done = run_train(tmp_path, *quick, "ckpt_path=last", "steps=3", "optimizer.lr=1e-4")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "resuming with optimizer.lr = 0.0001" in done.stdout
    assert record.read_text() != before


def test_a_critics_checkpoint_is_not_resumed_without_one(run_train: RunTrain, tmp_path: Path) -> None:
    write_tasks(tmp_path, ["one", "two", "three", "four"])
    quick = (*QUICK, "reward=contains_digits", "engine=transformers")
    assert run_train(tmp_path, *quick, *CRITIC).returncode == 0
    for arguments, asked in (((), "null"), ((*CRITIC, "algorithm.critic.model=tiny"), "a value model")):
        done = run_train(tmp_path, *quick, *arguments, "ckpt_path=last", "steps=2")
        assert done.returncode == 2, done.stdout[-3000:]
        assert f"algorithm.critic is {asked}, and that of the checkpoint" in done.stdout
        assert "is a value head: set algorithm.critic as in its run." in done.stdout
        assert "Traceback" not in done.stdout


def test_runs_and_evaluations_of_the_same_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compose, "datetime", Mock(now=lambda: datetime(2026, 11, 21, 12)))
    runs = [Path(compose.run_dir(str(tmp_path), "grpo", None)) for _ in range(3)]
    assert [folder.name[19:] for folder in runs] == ["", "~2", "~3"]
    evaluations = [Path(compose.run_dir(str(tmp_path), "grpo", None, "evaluate")) for _ in range(2)]
    assert [folder.name[19:] for folder in evaluations] == ["", "~2"]
    assert {folder.parent for folder in evaluations} == {tmp_path / "grpo" / "evaluate"}


def test_the_name_of_an_evaluation_is_no_path(tmp_path: Path) -> None:
    with refuses("name"):
        compose.run_dir(str(tmp_path), "../x", None, "evaluate")
