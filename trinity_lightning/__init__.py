"""Reinforcement fine-tuning of language models, made of PyTorch Lightning parts.

Importing this package is cheap: torch, Lightning and vLLM are imported by the parts that use them.
"""

import os

__version__ = "0.1.0.dev0"

# What libraries read when they are loaded, hence here; a value of your own stays.
# libgomp's threads spin 300,000 turns (16 ms) at a barrier before they sleep, and where something else runs too hold
# the core that the thread they wait for needs. Seconds of a training step, beside one busy process on two cores and
# alone, and tokens/s of rollouts:
#   turns     beside    alone    rollouts, alone
#   300,000     14.6     1.45    618
#   100,000     10.3     1.49    628 (one reading)
#    50,000        -        -    588 (one reading)
#    30,000      5.2     1.45      -
#    10,000      3.4     1.51    560
#     1,000        -     1.79      -
# One or two readings each; a later run of benchmarks/contended_training.py cost 3.4% alone and gained nothing beside
# one busy process. 30,000 is a compromise; on a machine that is always shared try GOMP_SPINCOUNT=10000.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")
# Large tensors come and go with every chunk of the vocabulary: on a CPU small pages cost more than the arithmetic.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# A layer needs about 20 compiled primitives for each shape of micro-batch, and all layers have the same. Micro-batches
# have a different shape every time, so that old primitives are never used again, and each holds a piece of the heap:
# with the 1,024 that oneDNN, and torch above it, keep, a run grew by 0.13 GB a step. Here, and not where a policy is
# made: the first product of a process reads the setting, and a run times one to choose its dtype.
PRIMITIVE_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
for _name, _value in PRIMITIVE_CACHES.items():
    os.environ.setdefault(_name, _value)
