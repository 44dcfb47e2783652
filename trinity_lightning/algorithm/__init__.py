"""The algorithms in plain torch: add strategies weigh experiences, policy losses learn from them."""
