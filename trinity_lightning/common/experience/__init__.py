"""The result of a rollout: `Experience`, its identity, its bytes, and its way into padded batches."""

from typing import TYPE_CHECKING, Any

from trinity_lightning.common.experience.experience import EID as EID
from trinity_lightning.common.experience.experience import CustomField as CustomField
from trinity_lightning.common.experience.experience import Experience as Experience
from trinity_lightning.common.experience.experience import ExperienceError as ExperienceError
from trinity_lightning.common.experience.experience import ExperienceFormatError as ExperienceFormatError
from trinity_lightning.common.experience.experience import group_by as group_by
from trinity_lightning.common.experience.gather import gather_response_attrs as gather_response_attrs
from trinity_lightning.common.experience.gather import gather_rows as gather_rows
from trinity_lightning.config.registry import import_object

if TYPE_CHECKING:
    from trinity_lightning.common.experience.batch import *  # noqa: F403
    from trinity_lightning.common.experience.datasets import *  # noqa: F403

_BATCH = ("Experiences", "gather_experiences", "split_dpo_experience_to_single_turn", "gather_token_ids")
_BATCH += ("gather_attention_masks", "gather_action_masks", "gather_multi_modal_inputs")
_DATASETS = ("from_hf_datasets", "to_hf_datasets")
_LATER = dict.fromkeys(_BATCH, "batch") | dict.fromkeys(_DATASETS, "datasets")  # what no run needs, imported on use

# For `import *`, the names that are imported on use too.
__all__ = [*(n for n in globals() if n[0] != "_"), *_LATER]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_object(f"{__name__}.{_LATER[name]}.{name}")
