"""vLLM in this process: its start, syncs, sleep, the same log-probabilities, and its speed (stage b)."""

import trinity_lightning  # noqa: F401  first: torch and OpenMP read what it sets when they are loaded

# isort: split
import statistics
from collections.abc import Callable
from typing import Any

import torch
from _gpu import Job
from _turns import clock, spread
from rollout import SharedEngine, prompts, run_async, run_llm
from transformers import AutoModelForCausalLM

from trinity_lightning.common.hardware import GIB
from trinity_lightning.common.model_memory import ModelShape
from trinity_lightning.config.engines import EngineDtype, EngineSleep
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.plan.memory import Rollouts, cache_bytes
from trinity_lightning.sync.stream import skeleton, weight_stream

SYNCS, SLEEPS, ROUNDS = 3, 3, 2
COMPARED = 8  # prompts whose log-probabilities are compared
CONTEXT_OF_PROMPT = 128  # tokens; the prompts have fewer
CHANGE = 0.03  # of the weights, relative
SHARE_OF_FREE = 0.4  # of the device's memory that the cache may take


class Engine:
    """An engine beside a model of transformers on the same device, and what is measured of them."""

    def __init__(self, job: Job, requests: int, new_tokens: int) -> None:
        self.job, (self.folder, _) = job, job.path()
        dtype, context = EngineDtype.bf16, CONTEXT_OF_PROMPT + new_tokens
        shape = ModelShape.of(skeleton(self.folder))
        wanted = cache_bytes(shape, Rollouts(2, context, requests), requests)
        free = 1 * GIB if job.small else int(SHARE_OF_FREE * torch.cuda.mem_get_info()[0])
        settings: dict[str, Any] = {"max_num_seqs": requests, "kv_cache_gb": min(wanted, free) / GIB}
        settings["sleep"] = EngineSleep.auto if job.small else EngineSleep.always
        model: Any = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.bfloat16)
        self.model = model.to(job.device)
        self.engine = SharedEngine(self.folder, dtype=dtype, max_model_len=context, **settings)
        self.driver = Driver([self.engine])
        self.settings = settings | {"sleep": settings["sleep"].value, "kv_cache_gb": round(settings["kv_cache_gb"], 4)}

    def do(self, coroutine: Callable[[], Any]) -> float:
        """Seconds that the engine takes for it."""
        start = clock()
        self.driver.run(coroutine())
        return clock() - start

    def free_gb(self) -> float:
        """Free memory of the GPU in GB; 0 without one."""
        return torch.cuda.mem_get_info()[0] / 1e9 if torch.cuda.is_available() else 0.0

    @torch.no_grad()
    def difference(self) -> dict[str, float]:
        """Mean and largest difference of the engine's log-probabilities from those of a forward pass."""
        differences = []
        for i, prompt in enumerate(prompts(self.engine, COMPARED)):
            asked = self.engine.generate(prompt, seed=i, max_tokens=32, ignore_eos=True, temperature=1.0)
            [answer] = self.driver.run(asked)
            tokens = torch.tensor([[*answer.prompt_token_ids, *answer.token_ids]], device=self.job.device)
            after = len(answer.prompt_token_ids)
            logprobs = self.model(tokens).logits.float().log_softmax(-1)[0, after - 1 : -1]
            chosen = logprobs.gather(1, tokens[0, after:, None])[:, 0].cpu()
            differences.append((chosen - torch.tensor(list(answer.logprobs))).abs())
        every = torch.cat(differences)
        return {"mean": round(float(every.mean()), 4), "largest": round(float(every.max()), 4)}

    @torch.no_grad()
    def change(self) -> None:
        """Change the weights of the model beside the engine, at random."""
        torch.manual_seed(0)
        for parameter in self.model.parameters():
            parameter.mul_(1 + CHANGE * torch.randn_like(parameter))

    def sync(self, version: int) -> float:
        """Seconds of a sync."""
        return self.do(lambda: self.engine.sync_weights(weight_stream(self.model), version))

    def close(self) -> None:
        self.driver.run(self.engine.shutdown())
        self.driver.close()


def engine(job: Job) -> None:
    """Stage b: one engine for the most requests, which fewer use as well."""
    counts, new_tokens = ((4, 8), 16) if job.small else ((512, 1024), 256)
    beside = Engine(job, max(counts), new_tokens)
    threads = torch.get_num_threads()
    with job.part("start", **beside.settings) as values:
        values["seconds"] = round(beside.do(beside.engine.load), 2)
        values |= {"threads_before": threads, "threads_after": torch.get_num_threads()}
    try:
        if not {"failed", "refused"}.isdisjoint(values):
            return
        differences(job, beside)
        slept(job, beside)
        slept_without_weights(job, beside)
        for count in counts:
            with job.part("speed", requests=count, new_tokens=new_tokens) as values:
                values |= speed(beside, count, new_tokens)
    finally:
        beside.close()


def differences(job: Job, beside: Engine) -> None:
    """Report the log-probabilities' differences before and after syncs, and the seconds of these."""
    with job.part("sync") as values:
        values["as_loaded"] = beside.difference()
        beside.change()
        values["other_weights"] = beside.difference()
        values["seconds"] = spread([beside.sync(version) for version in range(1, SYNCS + 1)], 4)
        values["after_sync"] = beside.difference()


def slept(job: Job, beside: Engine) -> None:
    """Report the seconds of sleeping and waking up, and the memory that is free meanwhile."""
    with job.part("sleep") as values:
        asleep, awake, freed = [], [], []
        for _ in range(SLEEPS):
            before = beside.free_gb()
            asleep.append(beside.do(beside.engine.sleep))
            freed.append(beside.free_gb() - before)
            awake.append(beside.do(beside.engine.wake_up))
        values |= {"seconds": spread(asleep, 4), "wake_up_s": spread(awake, 4), "first_s": round(asleep[0], 3)}
        values |= {"freed_gb": round(statistics.median(freed), 2), "after_sleep": beside.difference()}


def slept_without_weights(job: Job, beside: Engine) -> None:
    """Report the seconds of a sleep that drops the weights, as between a step and its sync, and of waking and syncing.

    `dropped` is False on a CPU, where vLLM does not sleep.
    """
    with job.part("sleep until a sync") as values:
        asleep, awake, synced, dropped = [], [], [], True
        for number in range(SLEEPS):
            start = clock()
            dropped = beside.driver.run(beside.engine.sleep_until_sync()) and dropped
            asleep.append(clock() - start)
            awake.append(beside.do(beside.engine.wake_up))
            synced.append(beside.sync(SYNCS + 1 + number))
        values |= {"dropped": dropped, "seconds": spread(asleep, 4), "wake_up_s": spread(awake, 4)}
        values |= {"sync_s": spread(synced, 4), "after_sync": beside.difference()}


def speed(beside: Engine, count: int, new_tokens: int) -> dict[str, Any]:
    """Tokens a second of this project's driver and of LLM.generate, which take turns after a round to warm up."""

    def settings(i: int) -> dict[str, Any]:
        return {"seed": i, "max_tokens": new_tokens, "ignore_eos": True, "temperature": 1.0}

    requests = prompts(beside.engine, count)
    sides = {
        "ours": lambda: run_async(beside.engine, beside.driver, requests, settings),
        "llm_generate": lambda: run_llm(beside.engine, requests, settings),
    }
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for round_number in range(ROUNDS + 1):
        for name, side in sides.items():
            start = clock()
            tokens = side()
            if round_number:
                speeds[name].append(tokens / (clock() - start))
    figures = {name: statistics.median(values) for name, values in speeds.items()}
    results = {f"{name}_tokens_per_second": round(value, 1) for name, value in figures.items()}
    results["us_a_token"] = round(1e6 / figures["ours"], 1)
    return results | {"ratio": round(figures["ours"] / figures["llm_generate"], 3)}
