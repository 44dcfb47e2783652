"""Against TRL's GRPOTrainer on the same device: the training phase, and a whole step (stages d and e).

One side after the other, each in a process that has the device to itself: the memory of both would not fit.
"""

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import vs_trl
import vs_trl_step
from _gpu import REWARD, Job, median, sentence, sizes, version
from _turns import spread

ROUNDS = 3
ROWS_A_PASS = (8, 32, 128)  # of TRL's; with more it needs more memory
LEAST_SECONDS = 60.0  # in which a candidate may be tried
OURS = {"max_tokens_per_micro_batch": 16384}  # what the memory plan chooses for a model of this size alone
LOSSY = "bf16_weights"
# TRL's side of the whole step: the whole GPU is its own, and its weights stay where they are.
COLOCATED = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.35}


def training(job: Job) -> None:
    """Stage d: each case with TRL's best settings of those that are tried, as long as there is time."""
    folder, vocabulary = job.path()
    groups, rounds = (2, 1) if job.small else (64, ROUNDS)
    spec = {"model": folder, "vocabulary": vocabulary, "check": False, "groups": groups, "group_size": 8}
    for case in ("short",) if job.small else ("short", "ragged", "uniform"):
        with job.part("train against TRL", case=case, rows=8 * groups, trl=version("trl")) as values:
            values |= compared(job, spec | {"case": case, "dtype": "bf16"}, rounds)
    with job.part("same step", case="ragged") as values:
        values |= same(spec)


def compared(job: Job, spec: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Ours, and TRL's quickest candidate, with what the others took."""
    algorithm = {"max_tokens_per_micro_batch": 128} if job.small else OURS
    ours = vs_trl.alone(spec | {"side": "ours", "algorithm": algorithm, "rows_a_pass": 8}, rounds)
    tried = candidates(job, spec | {"side": "trl", "algorithm": {}})
    if not (worked := {name: result for name, result in tried.items() if "seconds" in result}):
        raise RuntimeError(f"no candidate of TRL's works: {tried}")
    best = min(worked, key=lambda name: statistics.median(worked[name]["seconds"]))
    theirs, lossy = worked[best], {}
    if job.left > LEAST_SECONDS:
        trl = {**spec, "side": "trl", "algorithm": {}, **theirs["spec"]}
        theirs = vs_trl.alone(trl, rounds)
        lossy = vs_trl.alone(trl | {"dtype": LOSSY}, 1) if job.left > LEAST_SECONDS else {}
    seconds = {"ours": ours["seconds"], "trl": theirs["seconds"]}
    results = {
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "ratio": round(statistics.median(theirs["seconds"]) / statistics.median(ours["seconds"]), 2),
        "mfu": ours["mfu"] and round(ours["mfu"], 3),
        "peak_gb": {"ours": round(ours["peak_gb"], 2), "trl": round(theirs["peak_gb"], 2)},
        "trl_settings": best,
        "trl_tried": {name: result.get("failed") or round(result["seconds"][0], 3) for name, result in tried.items()},
    }
    return results | ({"trl_without_float32_weights_s": round(lossy["seconds"][0], 3)} if lossy else {})


def candidates(job: Job, spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Results of TRL's settings: rows a pass while more of them are quicker, then its kernels where they are installed.

    Gradient checkpointing is on only in what is tried if no candidate fits without.
    """
    tried: dict[str, dict[str, Any]] = {}

    def attempt(rows: int, **trl: Any) -> float:
        name = ", ".join([f"{rows} rows a pass", *(f"{key}={value}" for key, value in trl.items())])
        settings = {"rows_a_pass": rows, "trl": trl}
        try:
            tried[name] = vs_trl.alone(spec | settings, 1) | {"spec": settings}
        except RuntimeError as error:
            tried[name] = {"failed": sentence(str(error))}
            return float("inf")
        return tried[name]["seconds"][0]

    best, seconds = 0, float("inf")
    for rows in (8,) if job.small else ROWS_A_PASS:
        if tried and job.left < LEAST_SECONDS:
            break
        taken = attempt(rows)
        if taken >= seconds:
            break
        best, seconds = rows, taken
    if not best:
        attempt(ROWS_A_PASS[0], gradient_checkpointing=True)
    for kernels in kernel_settings() if best else ():
        if job.left > LEAST_SECONDS:
            attempt(best, **kernels)
    return tried


def kernel_settings() -> list[dict[str, Any]]:
    """TRL's settings that use kernels of packages that are installed here."""
    settings: list[dict[str, Any]] = []
    if importlib.util.find_spec("liger_kernel"):
        settings.append({"use_liger_kernel": True})
    if importlib.util.find_spec("flash_attn"):
        settings.append({"model_init_kwargs": {"attn_implementation": "flash_attention_2"}})
    if importlib.util.find_spec("kernels"):  # from the hub, or its cache
        settings.append({"model_init_kwargs": {"use_kernels": True}})
    return settings


def same(spec: dict[str, Any]) -> dict[str, float]:
    """Differences of a step of both sides in float64, with rows padded, as no kernel of a GPU shares prefixes in it."""
    spec = spec | {"case": "ragged", "algorithm": {"layout": "padded"}}
    return vs_trl.compare_steps(*(vs_trl.float64_step(spec | {"side": name}) for name in ("ours", "trl")))


# -- a whole step ------------------------------------------------------------------------------------------------------


def whole_step(job: Job) -> None:
    """Stage e: rollouts, training and sync of ours, and of TRL with vLLM in its process (on a CPU: transformers)."""
    steps, rows = (1, (8,)) if job.small else (2, (32, 8))
    groups, size, new_tokens, context = (2, 4, 8, 128) if job.small else (64, 8, 960, 1152)
    overrides = [f"model.name={job.path()[0]}", "model.dtype=bf16", REWARD, *sizes(job)]
    spec = {"folder": job.path()[0], "prompts": groups, "completions": size, "max_tokens": new_tokens}
    spec |= {"overrides": [*overrides, "trainer=cpu"] if job.small else overrides, "reward": "varied"}
    colocated = {} if job.small else COLOCATED | {"vllm_max_model_length": context}
    spec["trl"] = {"bf16": True, "gradient_checkpointing": False, **colocated}
    answers, peaks = dict[str, Any](), dict[str, float]()
    with tempfile.TemporaryDirectory() as scratch:
        spec["tasks"] = str(tasks := Path(scratch) / "tasks.json")
        vs_trl_step.write_tasks(tasks)
        with job.part("step of ours", rollouts=groups * size) as values:
            answers["ours"], peaks["ours"] = vs_trl_step.alone(spec | {"rows_a_pass": size}, "ours", steps)
            values |= parts_of(answers["ours"], peaks["ours"])
        for rows_a_pass in rows:
            if "trl" in answers or job.left < LEAST_SECONDS:
                break
            with job.part("step of TRL", rollouts=groups * size, rows_a_pass=rows_a_pass) as values:
                values["trl_side"] = installed(job.trl_python)  # not what `on` has, which is of this process
                side = spec | {"rows_a_pass": rows_a_pass}
                answers["trl"], peaks["trl"] = vs_trl_step.alone(side, "trl", steps, job.trl_python)
                values |= parts_of(answers["trl"], peaks["trl"])
    if len(answers) == 2:
        job.report("step against TRL", rollouts=groups * size, **vs_trl_step.summary(answers, peaks))


def installed(python: str | None = None) -> dict[str, str | None]:
    """The versions of packages that an interpreter imports, for TRL's side of a whole step; None: this interpreter."""
    packages = ("trl", "vllm", "torch", "transformers")
    code = f"""
import importlib.metadata, json
versions = {{package.name: package.version for package in importlib.metadata.distributions()}}
print(json.dumps({{name: versions.get(name) for name in {packages}}}))
"""
    return json.loads(subprocess.check_output([python or sys.executable, "-c", code], text=True))


def parts_of(steps: list[dict[str, Any]], peak: float) -> dict[str, Any]:
    """Seconds of the steps and of their parts, as far as they are known, and the peak memory."""
    parts = {name: median(steps, name) for name in (*vs_trl_step.PARTS, "completion_tokens") if name in steps[0]}
    return {"seconds": spread([step["seconds"] for step in steps]), **parts, "peak_gb": round(peak, 2)}
