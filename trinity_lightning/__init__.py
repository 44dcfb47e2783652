"""Reinforcement fine-tuning of language models, made of PyTorch Lightning parts.

Importing this package is cheap: torch, Lightning and vLLM are imported by the parts that use them.
"""

import logging
import os

__version__ = "0.1.0.dev0"

# What libraries read when they are loaded, hence here; a value of your own stays.
# A GPU has one number in all processes of a run, and nvidia-smi's: Lightning sets this too, but when the trainer's has
# been given its GPUs, so that servers would count others where they are not all alike.
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
# libgomp's threads spin 300,000 turns (about 16 ms) at a barrier before they sleep, and while something else runs too
# they hold the core that the thread they wait for needs. 10,000 turns outlast the gaps between torch's operations: a
# quiet machine loses about a twentieth (docs/performance.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
# Large tensors come and go with every chunk of the vocabulary: on a CPU small pages cost more than the arithmetic.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# A layer needs about 20 compiled primitives for each shape of micro-batch, which seldom comes again, and each holds a
# piece of the heap: with the 1,024 that oneDNN, and torch above it, keep, a run grew by 0.13 GB a step. Here: the first
# product of a process reads the setting, and a run times one to choose its dtype.
PRIMITIVE_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
for _name, _value in PRIMITIVE_CACHES.items():
    os.environ.setdefault(_name, _value)
# vLLM's CPU build warns of the memory node that it uses, at every start, by torch's log of C++.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# transformers imports torchao (extra `optim`) if it is there, and torch and it then warn of kernels that no run uses;
# vLLM warns of a Triton that is there, as torch brings it, and has nothing for a CPU.
for _name in ("torchao", "torch.utils._pytree", "vllm.triton_utils.importing"):
    if (_logger := logging.getLogger(_name)).level == logging.NOTSET:
        _logger.setLevel(logging.ERROR)
