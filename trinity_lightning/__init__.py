"""Reinforcement fine-tuning of language models, made of PyTorch Lightning parts.

Importing this package is cheap: the parts that use torch, Lightning or vLLM import them.
"""

import logging
import os

__version__ = "0.1.0.dev0"

# Libraries read these variables when they are loaded, therefore they are set here. A value that is set already stays.
# A GPU has the same number in all processes of a run: nvidia-smi's. Lightning sets this, too, but after the trainer has
# its GPUs: where GPUs are not all alike, servers would count them differently.
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
# holds memory: with the 1,024 that oneDNN, and torch above it, keep by default, a run grew by 0.13 GB a step. They are
# set here because the first product of a process reads them, and a run times a product to choose its dtype.
PRIMITIVE_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
for _name, _value in PRIMITIVE_CACHES.items():
    os.environ.setdefault(_name, _value)
# vLLM's CPU build warns at every start, in torch's log of C++, which memory node it uses.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# transformers imports torchao (extra `optim`) if it is installed; torchao and torch then warn of kernels that no run
# uses. vLLM warns of the Triton that torch brings along, which has no kernels for a CPU.
for _name in ("torchao", "torch.utils._pytree", "vllm.triton_utils.importing"):
    if (_logger := logging.getLogger(_name)).level == logging.NOTSET:
        _logger.setLevel(logging.ERROR)
