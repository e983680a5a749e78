"""From a log of events to batches of tensors."""
