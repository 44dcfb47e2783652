"""TIDY IT: operators filter, shape and judge the experiences of an explore step before they are weighed."""

from trinity_lightning.buffer.operators.experience_operator import EXPERIENCE_OPERATORS as EXPERIENCE_OPERATORS
from trinity_lightning.buffer.operators.experience_operator import AuxiliaryModels as AuxiliaryModels
from trinity_lightning.buffer.operators.experience_operator import ExperienceOperator as ExperienceOperator
from trinity_lightning.buffer.operators.experience_operator import ExperienceOperatorV1 as ExperienceOperatorV1
from trinity_lightning.buffer.operators.experience_operator import LegacyOperator as LegacyOperator
from trinity_lightning.buffer.operators.experience_operator import create_operators as create_operators
from trinity_lightning.config.buffer import OnError as OnError
from trinity_lightning.config.buffer import OperatorConfig as OperatorConfig
