"""Reinforcement fine-tuning of language models, made of PyTorch Lightning parts.

Importing this package is cheap: torch, Lightning and vLLM are imported by the parts that use them.
"""

__version__ = "0.1.0.dev0"
