"""The built-in policy losses and their needs, one line a loss. Rules read them before torch is imported.

A loss of your own has no line here. It may declare its needs by `trinity_lightning.algorithm.policy_loss.declares`;
otherwise they are found by trying it on four tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Needs:
    """The needs of a policy loss, and the experiences for which it is right.

    Attributes:
        ratio: it compares the policy with an older one, by `old_logprobs`.
        reference: it needs log-probabilities of the reference model.
        pairs: it learns from preference pairs.
        teacher: it needs a teacher's likeliest tokens at each token (operators=teacher_top_k).
        terms: it is a mixture of other losses, whose own needs apply.
        any_policy: it is right for experiences of any policy, so nothing has to correct for older weights.
        supervised: it needs nothing but the policy's log-probabilities, so anyone may have written the tokens.
        all_rows: it also trains tokens of advantage 0.
        proportional: it is proportional to the advantages, so that a weight on the advantages weighs the loss; or it
            ignores the advantages.
    """

    ratio: bool = False
    reference: bool = False
    pairs: bool = False
    teacher: bool = False
    terms: bool = False
    any_policy: bool = False
    supervised: bool = False
    all_rows: bool = False
    proportional: bool = True


@dataclass(frozen=True)
class Loss:
    """A built-in policy loss.

    Attributes:
        path: module and name of its function, within `trinity_lightning.algorithm.policy_loss`.
        needs: the needs that do not depend on its arguments.
        by_arguments: computes the other needs from its arguments.
    """

    path: str
    needs: Needs = Needs()
    by_arguments: Callable[[Arguments], dict[str, bool]] | None = None

    def needs_with(self, arguments: Arguments) -> Needs:
        """The needs with these arguments; `arguments` holds a value for every argument of the loss."""
        return self.needs if self.by_arguments is None else replace(self.needs, **self.by_arguments(arguments))


def _asymre(arguments: Arguments) -> dict[str, bool]:
    shifted = arguments["baseline_shift"] != 0
    return {"all_rows": shifted, "proportional": not shifted}


def _dpo(arguments: Arguments) -> dict[str, bool]:
    return {"reference": not arguments["reference_free"]}


def _rec(arguments: Arguments) -> dict[str, bool]:
    regularizer, weight = arguments["regularizer"], arguments["weight"]
    return {
        "ratio": arguments["clip_mode"] != "none" or weight == "importance_sampling" or regularizer == "k2",
        "all_rows": regularizer != "none",
        "proportional": regularizer == "none" and weight != "advantage",
    }


RATIO = Needs(ratio=True)

LOSSES: Mapping[str, Loss] = {
    "asymre": Loss("off_policy.asymre", Needs(any_policy=True), _asymre),
    "cispo": Loss("ratio.cispo", RATIO),
    "dpo": Loss("likelihood.dpo", Needs(pairs=True, any_policy=True, all_rows=True), _dpo),
    "dppo": Loss("ratio.dppo", RATIO),
    "grpo": Loss("ppo.ppo", RATIO),
    "gspo": Loss("ratio.gspo", RATIO),
    "mix": Loss("terms.mix", Needs(terms=True)),
    "opmd": Loss("likelihood.opmd", Needs(any_policy=True)),
    "ppo": Loss("ppo.ppo", RATIO),
    "rec": Loss("off_policy.rec", by_arguments=_rec),
    "reinforce": Loss("likelihood.reinforce"),
    "sapo": Loss("ratio.sapo", RATIO),
    "sft": Loss("likelihood.sft", Needs(any_policy=True, supervised=True, all_rows=True)),
    "sppo": Loss("off_policy.sppo", RATIO),
    "streams": Loss("terms.streams", Needs(terms=True)),
    "teacher_kl": Loss("likelihood.teacher_kl", Needs(teacher=True, any_policy=True, supervised=True, all_rows=True)),
    "topr": Loss("off_policy.topr", RATIO),
}
