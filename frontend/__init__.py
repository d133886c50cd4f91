"""Read a checkpoint folder and trace its model to programs, without loading weights."""
