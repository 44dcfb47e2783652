"""The result of a rollout: `Experience`, its identity, its bytes, and its way into padded batches."""

from trinity_lightning.common.experience.datasets import from_hf_datasets as from_hf_datasets
from trinity_lightning.common.experience.datasets import to_hf_datasets as to_hf_datasets
from trinity_lightning.common.experience.experience import Experience as Experience
from trinity_lightning.common.experience.experience import group_by as group_by
from trinity_lightning.common.experience.fields import EID as EID
from trinity_lightning.common.experience.fields import CustomField as CustomField
from trinity_lightning.common.experience.fields import ExperienceError as ExperienceError
from trinity_lightning.common.experience.fields import ExperienceFormatError as ExperienceFormatError
from trinity_lightning.common.experience.gather import Experiences as Experiences
from trinity_lightning.common.experience.gather import gather_action_masks as gather_action_masks
from trinity_lightning.common.experience.gather import gather_attention_masks as gather_attention_masks
from trinity_lightning.common.experience.gather import gather_experiences as gather_experiences
from trinity_lightning.common.experience.gather import gather_multi_modal_inputs as gather_multi_modal_inputs
from trinity_lightning.common.experience.gather import gather_response_attrs as gather_response_attrs
from trinity_lightning.common.experience.gather import gather_rows as gather_rows
from trinity_lightning.common.experience.gather import gather_token_ids as gather_token_ids
from trinity_lightning.common.experience.gather import (
    split_dpo_experience_to_single_turn as split_dpo_experience_to_single_turn,
)
