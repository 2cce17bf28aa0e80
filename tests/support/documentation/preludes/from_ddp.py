"""What docs/from-ddp.md leaves to the reader."""

from support.documentation.things import Net as Model
from support.documentation.things import loss_of, make_loader

loader = make_loader()
