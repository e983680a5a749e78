"""The ranker: plain tensors in, logits or a loss out; it holds no ID table."""
