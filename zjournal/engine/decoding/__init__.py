"""From logits to tokens: what is chosen, and later what may be."""
