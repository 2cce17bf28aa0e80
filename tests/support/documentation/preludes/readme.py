"""What README.md leaves to the reader."""

from support.documentation.things import Net, loss_of, make_loader

loader = make_loader()
