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
# they hold the core that the thread they wait for needs. 3,000 turns outlast the gaps between torch's operations: a
# quiet machine loses next to nothing. What is gained depends on how the kernel deals the cores. Seconds of a training
# step by benchmarks/contended_training.py, on two cores:
#   turns          alone    beside one busy process    beside two
#   300,000         1.17              4.1                  8.2
#   3,000           1.12              2.7                  2.9
#   (one thread)    1.92              1.7                  2.8
# On another machine the step beside one took 14.6 s with 300,000 turns and 3.4 with 10,000; 1,000 cost a quarter alone.
# Fewer threads are what helps reliably: README.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
# Large tensors come and go with every chunk of the vocabulary: on a CPU small pages cost more than the arithmetic.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# A layer needs about 20 compiled primitives for each shape of micro-batch, and all layers have the same. Micro-batches
# have a different shape every time, so that old primitives are never used again, and each holds a piece of the heap:
# with the 1,024 that oneDNN, and torch above it, keep, a run grew by 0.13 GB a step. Here, and not where a policy is
# made: the first product of a process reads the setting, and a run times one to choose its dtype.
PRIMITIVE_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
for _name, _value in PRIMITIVE_CACHES.items():
    os.environ.setdefault(_name, _value)
# transformers imports torchao (extra `optim`) if it is there, and torch and it then warn of kernels that no run uses.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
