"""How to train: tasks, batches, epochs. Nothing here knows of pruning."""
