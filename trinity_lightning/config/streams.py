"""Rules of objectives of several terms (policy_loss=streams), and of a teacher's top k (policy_loss=teacher_kl)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trinity_lightning.config.operators import OnError
from trinity_lightning.config.registry import PARTS, SINGLE_RESPONSE_WORKFLOWS
from trinity_lightning.config.schema import TrainConfig
from trinity_lightning.config.sections import Section, checked
from trinity_lightning.config.servers import TEACHER_OPERATOR
from trinity_lightning.config.training import AlgorithmConfig
from trinity_lightning.config.values import number, one_of
from trinity_lightning.errors import ConfigError

KEY = "algorithm.policy_loss.args.streams"
TOKENS = ("rollouts", "expert", "observations", "weights")
TEACHER_LOSS = "teacher_kl"
SUPERVISED = ("sft", TEACHER_LOSS)  # they need no advantages, and no policy that sampled the token
LOSSES = [name for name in PARTS["policy loss"] if name not in ("dpo", "mix", "streams")]  # of tokens
TAKEN = ("entropy", "kl", "pg")  # actor/NAME_loss is another metric


@dataclass
class StreamConfig(Section):
    """A term of an objective: a loss over tokens of its own, averaged over their number in the optimizer batch.

    Attributes:
        loss: a registered loss of tokens (`ppo`, `sft`, `teacher_kl`, ...), or the dotted path of your own.
        tokens: which tokens: `rollouts`, what the policy wrote in rollouts; `expert`, the responses of expert data
            (buffer.expert); `observations`, what the environment or the tools wrote into rollouts of several turns, by
            the chat template; `weights`, those with a weight in the experience's info["token_weights"][the stream's
            name], a number for each token of the response, which its loss is multiplied by.
        weight: of the term.
        args: arguments of the loss.

    Raises:
        ConfigError: an unknown name, a weight out of its range, or a loss that its tokens lack something for.
    """

    loss: str = checked("ppo", one_of, names=LOSSES, with_paths=True)
    tokens: str = checked("rollouts", one_of, names=TOKENS)
    weight: float = checked(1.0, number, least=0)
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens in ("expert", "observations") and "." not in self.loss and self.loss not in SUPERVISED:
            raise ConfigError(f"loss={self.loss} needs tokens that the policy sampled, not {self.tokens}: use sft.")
        if self.tokens == "expert" and self.loss == TEACHER_LOSS:
            raise ConfigError("loss=teacher_kl is of rollouts, and no teacher reads tokens=expert: use sft.")


def stream_configs(given: Any) -> dict[str, StreamConfig]:
    """The streams by name, in order; None: `ppo` on rollouts.

    Raises:
        ConfigError: no stream, or none with a weight; a name that a metric has, an unknown key, or a value that a
            stream refuses.
    """
    if given is None:
        given = {"rollouts": {}}
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(f"{KEY} is {given!r}; give {{name: {{loss, tokens, weight, args}}}}, at least one.")
    for name in TAKEN:
        if name in given:
            raise ConfigError(f"{KEY}.{name}: the metric actor/{name}_loss is something else: give it another name.")
    streams = {str(name): _stream(f"{KEY}.{name}", it) for name, it in given.items()}
    if not any(stream.weight for stream in streams.values()):
        raise ConfigError(f"{KEY}: all weights are 0, and nothing is trained: give one of them a weight above 0.")
    return streams


def _stream(key: str, given: Any) -> StreamConfig:
    if isinstance(given, StreamConfig):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(f"{key} is {given!r}; give {{loss, tokens, weight, args}}, each of them optional.")
    args = {} if given.get("args") is None else given["args"]
    if not isinstance(args, Mapping):
        raise ConfigError(f"{key}.args is {args!r}; give {{argument: value}}.")
    try:
        return StreamConfig(**{**given, "args": dict(args)})
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def streams_of(algorithm: AlgorithmConfig) -> dict[str, StreamConfig]:
    """The terms of the objective; of a loss that is no mixture, one by its own name. Errors as `stream_configs`."""
    loss = algorithm.policy_loss
    if loss.name == "streams":
        return stream_configs(loss.args.get("streams"))
    return {loss.name: StreamConfig(loss.name)}


def check_streams(run: TrainConfig) -> bool:
    """Whether a stream is of expert data.

    Raises:
        ConfigError: a stream without its tokens, or a loss without its teacher.
    """
    streams = streams_of(run.algorithm)
    one_turn = run.workflow.name in SINGLE_RESPONSE_WORKFLOWS or run.workflow.args.get("mode") == "step_wise"
    if run.buffer.has_rollouts and one_turn:
        for name, stream in streams.items():
            if stream.tokens == "observations":
                raise ConfigError(
                    f"{KEY}.{name}: the experiences of workflow={run.workflow.name} have one turn, and nothing "
                    "observed in it: choose workflow=multi_turn or workflow=tool_use, with workflow.args.mode=single."
                )
    if any(stream.loss == TEACHER_LOSS for stream in streams.values()) and run.buffer.has_rollouts:
        _check_teacher(run)
    return any(stream.tokens == "expert" for stream in streams.values())


def _check_teacher(run: TrainConfig) -> None:
    operators = run.operators.values()
    if not any(operator.name == TEACHER_OPERATOR or "." in operator.name for operator in operators):
        raise ConfigError(
            "loss teacher_kl needs a teacher: choose operators=teacher_top_k, and give its model as "
            "+auxiliary_models.teacher.model=FOLDER."
        )
    if run.sampling.temperature != 1:
        raise ConfigError(
            f"loss teacher_kl compares distributions at temperature 1, not {run.sampling.temperature}: set "
            "sampling.temperature=1."
        )
    for operator in operators:
        if operator.name == TEACHER_OPERATOR and operator.on_error is OnError.skip:
            raise ConfigError(
                "operator teacher_top_k: on_error is skip, and loss teacher_kl cannot do without the teacher: leave "
                "on_error out."
            )
