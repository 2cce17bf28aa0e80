"""What docs/from-ddp.md leaves to the reader."""

from documentation.things import Net as Model
from documentation.things import loss_of, make_loader

loader = make_loader()
