"""What is done on a lane once a collective is agreed: one file for each kind."""
