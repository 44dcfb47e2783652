"""Weight sync under the name of its first place; it is in `sync`."""

from trinity_lightning.sync.proof import Synchronizer as Synchronizer
from trinity_lightning.sync.stream import weight_stream as weight_stream
