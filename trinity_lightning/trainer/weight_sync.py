"""Weight sync under its first name; the code is in `sync`."""

from trinity_lightning.sync.proof import Synchronizer as Synchronizer
from trinity_lightning.sync.stream import weight_stream as weight_stream
