"""Shapes of models, by the numbers of their configurations."""

from trinity_lightning.common.model_memory import ModelShape

SMOLLM2 = ModelShape(134_515_008, 49152 * 576, 30, 576, 1536, 9, 576, 192, 49152, 49153 * 576)
QWEN_1_5B = ModelShape(1_543_714_304, 151936 * 1536, 28, 1536, 8960, 12, 1536, 256, 151936, 151937 * 1536)
QWEN_3B = ModelShape(3_085_938_688, 151936 * 2048, 36, 2048, 11008, 16, 2048, 256, 151936, 151937 * 2048)
