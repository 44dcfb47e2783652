"""Reinforcement fine-tuning of language models, made of PyTorch Lightning parts.

Importing this package is cheap: torch, Lightning and vLLM are imported only by the modules that use them.
"""

import logging
import os

__version__ = "0.1.0"

# Libraries read these variables when they are loaded. Therefore this module sets them. A value that the user has set
# stays.

# Number the GPUs as nvidia-smi does, in all processes of a run. Lightning sets this variable too, but only after the
# trainer has its GPUs: on a machine with GPUs of several kinds, servers would then number them differently.
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
# libgomp's threads spin 300,000 turns (about 16 ms) at a barrier before they sleep. If other programs run, the spinning
# threads hold the core that the awaited thread needs. 10,000 turns are longer than the gaps between torch's operations,
# and cost a quiet machine about a twentieth (docs/performance.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
# Each chunk of the vocabulary allocates and frees large tensors: on a CPU, small pages would cost more than the
# arithmetic.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# A layer needs about 20 compiled primitives for each shape of micro-batch, and shapes seldom repeat. Each primitive
# holds memory. By default oneDNN keeps 1,024 of them, and so does torch's own cache: a run then grew by 0.13 GB a step.
# The first matrix product of a process reads both limits, and a run computes one early, to choose its dtype.
PRIMITIVE_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
for _name, _value in PRIMITIVE_CACHES.items():
    os.environ.setdefault(_name, _value)
# vLLM's CPU build warns at every start, in torch's log of C++, which memory node it uses.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# transformers imports torchao (extra `optim`) if it is installed. torchao and torch then warn of kernels that no run
# uses. vLLM warns that the Triton installed with torch has no kernels for a CPU.
for _name in ("torchao", "torch.utils._pytree", "vllm.triton_utils.importing"):
    if (_logger := logging.getLogger(_name)).level == logging.NOTSET:
        _logger.setLevel(logging.ERROR)
