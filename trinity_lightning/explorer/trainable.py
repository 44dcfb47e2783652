"""What rollouts ask of the module that is trained on them."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from trinity_lightning.common.experience import Experience


class Objective(Protocol):
    """What rollouts need to know of the loss."""

    needs_all_rows: bool

    def expect_older_weights(self) -> None: ...


class TrainablePolicy(Protocol):
    """The module that is trained on rollouts, and whose weights engines are given: PolicyModule, or one's own."""

    @property
    def policy(self) -> Any:
        """The Hugging Face model, and below its tokenizer and its loss."""
        ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def objective(self) -> Objective: ...

    def check_trainable(self) -> None:
        """Raise what keeps it from being trained; called before an engine is loaded."""

    def prepare_step(self, experiences: Sequence[Experience]) -> dict[str, list[Tensor]]:
        """Columns that are computed once a step, before it is trained on."""
        ...

    def sequence_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """The log-probability of each token after the first."""
        ...
