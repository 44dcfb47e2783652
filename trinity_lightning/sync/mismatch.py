"""What is said if an engine does not have the weights of the trainer, or cannot be given them."""

from collections.abc import Mapping, Sequence

from trinity_lightning.common.failures import listed
from trinity_lightning.config.values import nearest
from trinity_lightning.errors import WeightSyncError
from trinity_lightning.sync.stream import Shape

MAX_LISTED = 8


def misfit(sent: Mapping[str, Shape], expected: Mapping[str, Shape]) -> WeightSyncError:
    """Every difference between shapes by name, the first 8 of each kind, and what to do."""
    missing = [f"'{name}'" for name in expected if name not in sent]
    matches = {name: nearest(name, expected) for name in sent if name not in expected}
    unknown = [f"'{name}'" + (f" (nearest: '{match}')" if match else "") for name, match in matches.items()]
    wrong = [
        f"'{name}' {tuple(shape)}, expected {tuple(expected[name])}"
        for name, shape in sent.items()
        if name in expected and shape != expected[name]
    ]
    kinds = {"missing": missing, "unknown to the engine": unknown, "wrong shape": wrong}
    problems = [f"{len(names)} {kind}: {listed(names, MAX_LISTED)}" for kind, names in kinds.items() if names]
    return WeightSyncError(
        f"the weights do not fit the engine, which was not touched. {'. '.join(problems)}. Trainer and engine must "
        "hold the same model; send every parameter under its checkpoint name, a tied 'lm_head.weight' too."
    )


def unknown_weight(name: str, shapes: Mapping[str, Shape]) -> KeyError:
    """The error for a name that the policy has no weight of: which one is nearest."""
    match = nearest(name, shapes)
    hint = f"Did you mean '{match}'?" if match else f"The first is '{next(iter(shapes), None)}'."
    return KeyError(f"unknown weight '{name}' (the policy has {len(shapes)}). {hint}")


def different_texts(trainer: Sequence[float], engine: Sequence[float], what: str) -> WeightSyncError:
    """The error if the two lists that a probe or drill (`what`) compares are not of the same tokens."""
    return WeightSyncError(
        f"{what}: {len(trainer)} log-probabilities of the trainer, {len(engine)} of the engine: they read the text "
        "with different tokenizers."
    )


def different_logprobs(
    trainer: Sequence[float], engine: Sequence[float], mean: tuple[float, float], worst: tuple[float, float], what: str
) -> WeightSyncError:
    """The error if they differ by more than rounding; the mean and the worst difference, each with what is allowed."""
    return WeightSyncError(
        f"{what}: the engine's log-probabilities are not the trainer's. Mean |difference| {mean[0]:.3g} (allowed "
        f"{mean[1]:.3g}), of the worst token {worst[0]:.3g} (allowed {worst[1]:.3g}); mean log-probability of the "
        f"trainer {sum(trainer) / len(trainer):.4f}, of the engine {sum(engine) / len(engine):.4f}. "
        "The engine does not have the trainer's weights, computes in another dtype (engine.dtype; --dtype of a "
        "server of engine.urls), or another model. One of yours must compute `_logprobs` with what `_take` was given."
    )


def unmoved() -> WeightSyncError:
    """The error if no noise of the drill moves the policy's log-probabilities."""
    return WeightSyncError(
        "the drill could not perturb the policy enough to tell whether weights arrive: its log-probabilities "
        "hardly depend on its weights. Is the checkpoint whole? synchronizer.drill=false skips the drill."
    )


def not_in_time(seconds: float) -> WeightSyncError:
    """The error for a weight sync that took longer."""
    return WeightSyncError(
        f"a weight sync did not end within {seconds:g} s (synchronizer.sync_timeout): does every engine live? "
        "Restart the servers of engine.urls: they may hold half of the weights."
    )
