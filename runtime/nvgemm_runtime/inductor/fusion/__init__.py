"""Fuses GEMMs with the activations, gates and scales around them."""
